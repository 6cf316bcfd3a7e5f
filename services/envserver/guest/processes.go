package main

import (
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// process is a child with a session of its own.
type process struct {
	pid    int
	cgroup *cgroup
	// Whether the kernel ended a process of it for want of memory; known after killRest.
	hasRunOut bool
	// Closed once status and usage are known.
	exited chan struct{}
	status syscall.WaitStatus
	usage  syscall.Rusage
}

// children are all processes that were started and have not been waited for. Its lock is held
// around a start, so that no child is reaped before it is known.
var children = struct {
	mu    sync.Mutex
	known map[int]*process
}{known: map[int]*process{}}

// reap waits for every child of ours, adopted ones included, as long as the agent lives. Signals are
// kept from its return on: one that came before would leave a child unnoticed until the next ends.
func reap() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGCHLD)
	go func() {
		for range signals {
			for reapOne() {
			}
		}
	}()
}

func reapOne() bool {
	var status syscall.WaitStatus
	var usage syscall.Rusage
	pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, &usage)
	if err != nil || pid <= 0 {
		return err == syscall.EINTR
	}
	children.mu.Lock()
	defer children.mu.Unlock()
	if p := children.known[pid]; p != nil {
		delete(children.known, pid)
		p.status, p.usage = status, usage
		close(p.exited)
	}
	return true
}

// program is what to start.
type program struct {
	// The file, where it is not looked for by the first argument.
	path      string
	argv, env []string
	dir       string
	files     []uintptr
	uid       int
	limits    *limitsMessage
}

func start(p program) (*process, error) {
	path, err := p.path, error(nil)
	if path == "" {
		path, err = lookUp(p.argv[0], p.env)
	}
	if err != nil {
		return nil, err
	}
	attributes := syscall.ProcAttr{Dir: p.dir, Env: p.env, Files: p.files, Sys: &syscall.SysProcAttr{Setsid: true}}
	if p.uid >= 0 && os.Geteuid() == 0 {
		id := uint32(p.uid)
		attributes.Sys.Credential = &syscall.Credential{Uid: id, Gid: id}
	}
	group := newCgroup()
	if folder := group.admit(attributes.Sys); folder >= 0 {
		defer closeFd(folder)
	}
	children.mu.Lock()
	defer children.mu.Unlock()
	pid, err := syscall.ForkExec(path, p.argv, &attributes)
	if err != nil {
		group.remove()
		return nil, err
	}
	child := &process{pid: pid, cgroup: group, exited: make(chan struct{})}
	children.known[pid] = child
	child.limit(p.limits)
	return child, nil
}

// lookUp is the file that a program's name stands for.
func lookUp(name string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	for _, pair := range env {
		folders, isPath := strings.CutPrefix(pair, "PATH=")
		for folder := range strings.SplitSeq(folders, ":") {
			file := folder + "/" + name
			if isPath && folder != "" && syscall.Access(file, 1) == nil {
				return file, nil
			}
		}
	}
	return "", refusal{statusNotFound, name + ": no such program"}
}

// limit sets what a start cannot; a child that forks faster than this is held by its cgroup.
func (p *process) limit(m *limitsMessage) {
	setLimit(p.pid, syscall.RLIMIT_CORE, 0)
	if m != nil {
		for which, value := range map[int]uint64{
			rlimitProcesses: m.processes, syscall.RLIMIT_NOFILE: m.openFiles,
			syscall.RLIMIT_FSIZE: m.fileBytes, syscall.RLIMIT_AS: m.memoryBytes,
		} {
			if value > 0 {
				setLimit(p.pid, which, value)
			}
		}
	}
	// The agent itself is the last that the kernel should end when memory is short.
	_ = os.WriteFile("/proc/"+strconv.Itoa(p.pid)+"/oom_score_adj", []byte("500"), 0)
}

const rlimitProcesses = 6

func setLimit(pid, which int, value uint64) {
	limit := syscall.Rlimit{Cur: value, Max: value}
	_, _, _ = syscall.Syscall6(syscall.SYS_PRLIMIT64, uintptr(pid), uintptr(which),
		uintptr(unsafe.Pointer(&limit)), 0, 0, 0)
}

// signal reaches the process group, and with a cgroup all that came of it.
func (p *process) signal(number syscall.Signal) {
	select {
	case <-p.exited:
		return // its number may be reused by now
	default:
	}
	for _, pid := range p.cgroup.members() {
		_ = syscall.Kill(pid, number)
	}
	_ = syscall.Kill(-p.pid, number)
	for _, pid := range p.session() {
		_ = syscall.Kill(pid, number)
	}
}

// killRest ends everything that the process left behind. Without a cgroup, a process that made a
// session of its own is found once no other command runs that it could belong to.
func (p *process) killRest() {
	for range 100 {
		p.cgroup.kill()
		left := p.left()
		if len(left) == 0 {
			break
		}
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(time.Millisecond)
	}
	p.hasRunOut = p.cgroup.hasRunOut()
	p.cgroup.remove()
}

// killAll ends everything that still runs after the last host has gone.
func killAll() {
	children.mu.Lock()
	defer children.mu.Unlock()
	for pid := range children.known {
		_ = syscall.Kill(-pid, syscall.SIGKILL)
	}
}

func (p *process) left() []int {
	if p.cgroup != nil {
		return p.cgroup.members()
	}
	return p.session()
}

// session are the processes of this one's session; when no other child runs, also those that the
// agent has inherited.
func (p *process) session() []int {
	if p.cgroup != nil {
		return nil
	}
	children.mu.Lock()
	_, isRunning := children.known[p.pid]
	isAlone := !isRunning && len(children.known) == 0
	children.mu.Unlock()
	folders, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var found []int
	for _, folder := range folders {
		pid, err := strconv.Atoi(folder.Name())
		if err != nil || pid == p.pid {
			continue
		}
		parent, session, isZombie := relations(pid)
		if !isZombie && (session == p.pid || isAlone && parent == os.Getpid()) {
			found = append(found, pid)
		}
	}
	return found
}

// relations are a process's parent and session.
func relations(pid int) (parent, session int, isZombie bool) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0, true
	}
	// The name is in parentheses and may hold anything.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 4 {
		return 0, 0, true
	}
	parent, _ = strconv.Atoi(fields[1])
	session, _ = strconv.Atoi(fields[3])
	return parent, session, fields[0] == "Z" || fields[0] == "X"
}
