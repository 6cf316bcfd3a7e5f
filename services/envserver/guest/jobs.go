package main

import (
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
)

const (
	maxRunningJobs = 64
	maxJobs        = 256
	defaultJobRead = 64 << 10
	maxJobRead     = 1 << 20
)

// job is a command that nobody waits for; its output is a file, which snapshots and forks carry.
type job struct {
	number uint32
	callID []byte
	child  *process
	log    string
	// Closed once nothing of it is left.
	ended chan struct{}
}

// jobs are those of this sandbox, oldest first.
type jobs struct {
	folder string
	ended  func(*jobExitMessage)

	mu   sync.Mutex
	last uint32
	all  []*job
}

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

// add makes room for a new job, or refuses it.
func (j *jobs) add(callID []byte) (*job, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	numRunning, oldest := 0, -1
	for i, each := range j.all {
		if each.isRunning() {
			numRunning++
		} else if oldest < 0 {
			oldest = i
		}
	}
	if numRunning >= maxRunningJobs {
		return nil, refusal{statusBusy, "too many background jobs"}
	}
	if len(j.all) >= maxJobs && oldest >= 0 {
		_ = os.Remove(j.all[oldest].log)
		j.all = append(j.all[:oldest], j.all[oldest+1:]...)
	}
	j.last++
	made := &job{number: j.last, callID: callID, ended: make(chan struct{})}
	made.log = j.folder + "/job-" + strconv.FormatUint(uint64(made.number), 10) + ".log"
	j.all = append(j.all, made)
	return made, nil
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
	argv, err := argumentsOf(m)
	if err != nil {
		return nil, err
	}
	all := &c.agent.jobs
	made, err := all.add(c.id())
	if err != nil {
		return nil, err
	}
	if err := made.start(all.folder, program{
		argv: argv, env: environment(m.env), dir: at.root, uid: c.user(), limits: m.limits,
	}); err != nil {
		close(made.ended)
		return nil, err
	}
	go made.watch(all.ended, time.Duration(m.timeoutMs)*time.Millisecond)
	return &resultMessage{exec: &execResultMessage{job: made.number, isRunning: true}}, nil
}

func (j *job) start(folder string, what program) error {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return err
	}
	flags := syscall.O_WRONLY | syscall.O_APPEND | syscall.O_CREAT | syscall.O_EXCL | syscall.O_CLOEXEC
	log, err := openAt(-100, j.log, flags, 0o600)
	if err != nil {
		return err
	}
	defer closeFd(log)
	null, err := openAt(-100, os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer closeFd(null)
	what.files = []uintptr{uintptr(null), uintptr(log), uintptr(log)}
	j.child, err = start(what)
	return err
}

// watch waits for the end, and brings it about after the time limit if there is one.
func (j *job) watch(ended func(*jobExitMessage), limit time.Duration) {
	var timeout <-chan time.Time
	if limit > 0 {
		timeout = time.After(limit)
	}
	select {
	case <-j.child.exited:
	case <-timeout:
		j.child.signal(syscall.SIGTERM)
		select {
		case <-j.child.exited:
		case <-time.After(termGrace):
			j.child.signal(syscall.SIGKILL)
			<-j.child.exited
		}
	}
	j.child.killRest()
	close(j.ended)
	var status execResultMessage
	status.setStatus(j.child.status)
	ended(&jobExitMessage{j.number, status.exitCode, status.signal})
}

const (
	jobStatus = 1
	jobRead   = 2
	jobAwait  = 3
	jobKill   = 4
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
	case jobKill:
		if found.child != nil {
			found.child.signal(syscall.SIGKILL)
		}
		fallthrough
	case jobAwait:
		select {
		case <-found.ended:
		case <-c.done:
			return nil, c.stopped()
		}
	default:
		return nil, refusal{statusInvalid, "no such operation on a job"}
	}
	return found.result(), nil
}

func (j *job) result() *resultMessage {
	result := execResultMessage{job: j.number, isRunning: j.isRunning()}
	if info, err := os.Lstat(j.log); err == nil {
		result.logBytes = uint64(info.Size())
	}
	if result.isRunning || j.child == nil {
		return &resultMessage{exec: &result}
	}
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
