package main

import (
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
)

const (
	// Numbers of the controller's jobs begin behind this one, and no tool of the policy says them.
	controllersJobs = 1 << 31

	// Of each table.
	maxRunningJobs = 8
	// Of those that have ended, the oldest is forgotten first.
	maxJobs        = 64
	defaultJobRead = 64 << 10
	maxJobRead     = 1 << 20
	// A job's log and disk are looked at this often: it may run for hours.
	jobWatchInterval = time.Second
)

// job is a background command; its output is a file, which snapshots and forks carry.
type job struct {
	number uint32
	callID []byte
	child  *process
	log    string
	input  *jobInput
	// The limit that ended it; read once it has ended.
	endedFor string
	// Told to end it.
	killed chan struct{}
	// Closed once nothing of it is left.
	ended chan struct{}
}

// jobs are those of this sandbox, oldest first, in two tables: the policy's and the controller's.
type jobs struct {
	folder string
	ended  func(*jobExitMessage)

	mu sync.Mutex
	// How many the policy has started, and the controller.
	started, controllers uint32
	all                  []*job
}

func (j *job) isControllers() bool { return j.number > controllersJobs }

// open are the jobs that run.
func (j *jobs) open() []openMessage {
	j.mu.Lock()
	defer j.mu.Unlock()
	var found []openMessage
	for _, each := range j.all {
		if each.isRunning() {
			found = append(found, openMessage{callID: each.callID, background: true, job: each.number})
		}
	}
	return found
}

func (j *job) isRunning() bool {
	select {
	case <-j.ended:
		return false
	default:
		return true
	}
}

// add makes room for a new job in its table, or refuses it.
func (j *jobs) add(callID []byte, isControllers bool) (*job, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	numRunning, numKnown, oldest := 0, 0, -1
	for i, each := range j.all {
		if each.isControllers() != isControllers {
			continue
		}
		numKnown++
		if each.isRunning() {
			numRunning++
		} else if oldest < 0 {
			oldest = i
		}
	}
	if numRunning >= maxRunningJobs {
		return nil, refusal{statusBusy, "too many background jobs"}
	}
	if numKnown >= maxJobs && oldest >= 0 {
		_ = os.Remove(j.all[oldest].log)
		j.all = append(j.all[:oldest], j.all[oldest+1:]...)
	}
	made := &job{
		number: j.next(isControllers), callID: callID, input: &jobInput{feed: -1},
		killed: make(chan struct{}, 1), ended: make(chan struct{}),
	}
	made.log = j.folder + "/job-" + strconv.FormatUint(uint64(made.number), 10) + ".log"
	j.all = append(j.all, made)
	return made, nil
}

func (j *jobs) next(isControllers bool) uint32 {
	if isControllers {
		j.controllers++
		return controllersJobs + j.controllers
	}
	j.started++
	return j.started
}

func (j *jobs) find(number uint32) (*job, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, each := range j.all {
		if each.number == number {
			return each, nil
		}
	}
	return nil, refusal{statusNotFound, "no such job"}
}

func (c *call) execInBackground(at place, m *execMessage) (*resultMessage, error) {
	what, err := c.programOf(at, m)
	if err != nil {
		return nil, err
	}
	all := &c.agent.jobs
	made, err := all.add(c.id(), m.isControllers)
	if err != nil {
		return nil, err
	}
	if err := made.start(all.folder, m.hasInput, what); err != nil {
		made.input.end()
		close(made.ended)
		return nil, err
	}
	go made.watch(at.root, m, all.ended)
	return &resultMessage{exec: &execResultMessage{job: made.number, isRunning: true}}, nil
}

func (j *job) start(folder string, hasInput bool, what program) error {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return err
	}
	flags := syscall.O_WRONLY | syscall.O_APPEND | syscall.O_CREAT | syscall.O_EXCL | syscall.O_CLOEXEC
	log, err := openAt(-100, j.log, flags, 0o600)
	if err != nil {
		return err
	}
	defer closeFd(log)
	input, err := j.input.open(hasInput)
	if err != nil {
		return err
	}
	defer closeFd(input)
	what.files = []uintptr{uintptr(input), uintptr(log), uintptr(log)}
	j.child, err = start(what)
	return err
}

// watch waits for the end, and brings it about when a limit is broken or a call asks.
func (j *job) watch(folder string, m *execMessage, ended func(*jobExitMessage)) {
	var timeout, kill <-chan time.Time
	if m.timeoutMs > 0 {
		timeout = time.After(time.Duration(m.timeoutMs) * time.Millisecond)
	}
	look := time.NewTicker(jobWatchInterval)
	defer look.Stop()
	end := func(why string, grace time.Duration) {
		if kill == nil {
			j.endedFor = why
			j.child.signal(syscall.SIGTERM)
			kill = time.After(grace)
		}
	}
	for isRunning := true; isRunning; {
		select {
		case <-j.child.exited:
			isRunning = false
		case <-timeout:
			end("time", termGrace)
		case <-j.killed:
			end("", termGrace)
		case <-look.C:
			if why := j.broken(folder, m.limits); why != "" {
				end(why, 0)
			}
		case <-kill:
			j.child.signal(syscall.SIGKILL)
		}
	}
	j.child.killRest()
	j.input.end()
	var status execResultMessage
	status.setStatus(j.child.status)
	if j.child.hasRunOut && j.endedFor == "" && (status.signal == uint32(syscall.SIGKILL) || status.exitCode == killedInShell) {
		j.endedFor = "memory"
	}
	// The limit on the size of a file may have come before ours.
	if j.endedFor == "" && j.broken(folder, m.limits) == "output" {
		j.endedFor = "output"
	}
	close(j.ended)
	ended(&jobExitMessage{j.number, status.exitCode, status.signal})
}

// broken is the limit that the job exceeds, if it does.
func (j *job) broken(folder string, limits *limitsMessage) string {
	if limits == nil {
		return ""
	}
	if limits.floodBytes > 0 && j.logBytes() > limits.floodBytes {
		return "output"
	}
	if free, ok := freeBytes(folder); ok && free < limits.minFreeBytes {
		return "disk"
	}
	return ""
}

func (j *job) logBytes() uint64 {
	info, err := os.Lstat(j.log)
	if err != nil {
		return 0
	}
	return uint64(info.Size())
}

const (
	jobStatus = 1
	jobRead   = 2
	jobAwait  = 3
	jobKill   = 4
	jobWrite  = 5
)

func (c *call) job(m *jobMessage) (*resultMessage, error) {
	found, err := c.agent.jobs.find(m.job)
	if err != nil {
		return nil, err
	}
	switch m.operation {
	case jobStatus:
	case jobRead:
		if err := c.sendLog(found, m); err != nil {
			return nil, err
		}
	case jobWrite:
		if err := found.input.write(m.input, m.endInput); err != nil {
			return nil, err
		}
	case jobKill:
		nudge(found.killed)
		fallthrough
	case jobAwait:
		var over <-chan time.Time
		if m.waitMs > 0 {
			over = time.After(time.Duration(m.waitMs) * time.Millisecond)
		}
		select {
		case <-found.ended:
		case <-over:
		case <-c.done:
			return nil, c.stopError()
		}
	default:
		return nil, refusal{statusInvalid, "no such operation on a job"}
	}
	return found.result(), nil
}

func (j *job) result() *resultMessage {
	result := execResultMessage{job: j.number, isRunning: j.isRunning()}
	result.logBytes = j.logBytes()
	if result.isRunning || j.child == nil {
		return &resultMessage{exec: &result}
	}
	result.endedFor, result.timedOut = j.endedFor, j.endedFor == "time"
	result.setStatus(j.child.status)
	return &resultMessage{exec: &result, usage: usageOf(&j.child.usage)}
}

func (c *call) sendLog(j *job, m *jobMessage) error {
	log, err := openAt(-100, j.log, openRead, 0)
	if err != nil {
		return err
	}
	defer closeFd(log)
	limit := min(m.limit, maxJobRead)
	if limit == 0 {
		limit = defaultJobRead
	}
	piece := make([]byte, limit)
	n, err := readAt(log, piece, int64(min(m.offset, 1<<62)))
	if err != nil {
		return err
	}
	if err := c.data(1, piece[:n]); err != nil {
		return err
	}
	c.endData(1)
	return nil
}
