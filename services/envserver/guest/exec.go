package main

import (
	"os"
	"syscall"
	"time"
)

const (
	termGrace     = 2 * time.Second
	watchInterval = 100 * time.Millisecond
	// After everything that could write is dead, its last bytes are here at once.
	drainTime     = 200 * time.Millisecond
	maxKeptPart   = 1 << 20
	maxArguments  = 4096
	killedInShell = 128 + 9
)

// command is one running exec and why it is being ended.
type command struct {
	call     *call
	request  *execMessage
	child    *process
	out      *headTailBuffer
	err      *headTailBuffer
	readers  []*os.File
	flooded  chan struct{}
	endedFor string
	timedOut bool
	kill     <-chan time.Time
}

func environment(pairs []pairMessage) []string {
	env := make([]string, 0, len(pairs))
	for _, pair := range pairs {
		env = append(env, pair.key+"="+pair.value)
	}
	return env
}

const shellPath = "/bin/sh"

// programOf is what a request asks to run, as this call's user.
func (c *call) programOf(at place, m *execMessage) (program, error) {
	what := program{env: environment(m.env), dir: at.root, uid: c.user(), limits: m.limits}
	if len(m.shell) > 0 {
		// Shells begin their complaints with this name, on every driver with the same.
		what.path, what.argv = shellPath, []string{"sh", "-c", string(m.shell)}
		return what, nil
	}
	if len(m.argv) == 0 || len(m.argv) > maxArguments || len(m.argv[0]) == 0 {
		return what, refusal{statusInvalid, "no command, or too many arguments"}
	}
	for _, argument := range m.argv {
		what.argv = append(what.argv, string(argument))
	}
	return what, nil
}

// user is who a call's command is: the one that it names, or the sandbox's.
func (c *call) user() int {
	if c.request.uid != nil {
		return int(*c.request.uid)
	}
	return c.agent.uid
}

func (c *call) exec(at place, m *execMessage) (*resultMessage, error) {
	what, err := c.programOf(at, m)
	if err != nil {
		return nil, err
	}
	run := &command{call: c, request: m, flooded: make(chan struct{}, 1)}
	if err := run.start(what); err != nil {
		return nil, err
	}
	c.takeSignals(func(number uint32) { run.child.signal(syscall.Signal(number)) })
	run.wait(at.root)
	c.takeSignals(nil)
	run.child.killRest()
	run.drain()
	return run.report()
}

// start connects the streams and starts the child.
func (r *command) start(what program) error {
	var limits limitsMessage
	if r.request.limits != nil {
		limits = *r.request.limits
	}
	head, tail := int(min(r.request.headBytes, maxKeptPart)), int(min(r.request.tailBytes, maxKeptPart))
	r.out = newHeadTailBuffer(head, tail, limits.floodBytes, r.flooded)
	reader, writer, err := os.Pipe()
	if err != nil {
		return err
	}
	writers := []*os.File{writer, writer}
	r.readers = []*os.File{reader}
	if !r.request.merged {
		r.err = newHeadTailBuffer(head, tail, limits.floodBytes, r.flooded)
		if reader, writer, err = os.Pipe(); err != nil {
			closeAll(append(r.readers, writers[0]))
			return err
		}
		writers[1] = writer
		r.readers = append(r.readers, reader)
	}
	input, feed, err := r.input()
	if err == nil {
		// Fd makes the child's end a blocking one.
		what.files = []uintptr{input.Fd(), writers[0].Fd(), writers[1].Fd()}
		r.child, err = start(what)
		_ = input.Close()
	}
	closeAll(writers)
	if err != nil {
		closeAll(append(r.readers, feed))
		return err
	}
	go r.out.pump(r.readers[0])
	if r.err != nil {
		go r.err.pump(r.readers[1])
	}
	if feed != nil {
		go r.feed(feed)
	}
	return nil
}

// input is what the child reads, and where the host's data goes if it sends any.
func (r *command) input() (*os.File, *os.File, error) {
	if r.request.hasInput {
		return os.Pipe()
	}
	null, err := os.Open(os.DevNull)
	return null, nil, err
}

func (r *command) feed(to *os.File) {
	defer to.Close()
	for {
		piece, err := r.call.receive(r.child.exited)
		if err != nil || piece == nil {
			return
		}
		if _, err := to.Write(piece); err != nil {
			return
		}
	}
}

func closeAll(files []*os.File) {
	for _, file := range files {
		if file != nil {
			_ = file.Close()
		}
	}
}

// wait ends the command when it breaks a limit, and returns when it has ended.
func (r *command) wait(folder string) {
	var timeout, look <-chan time.Time
	var leastFree uint64
	if ms := r.request.timeoutMs; ms > 0 {
		timer := time.NewTimer(time.Duration(ms) * time.Millisecond)
		defer timer.Stop()
		timeout = timer.C
	}
	if limits := r.request.limits; limits != nil && limits.minFreeBytes > 0 {
		ticker := time.NewTicker(watchInterval)
		defer ticker.Stop()
		look = ticker.C
		// On a disk that is full already a command may still delete files.
		leastFree = limits.minFreeBytes
		if free, ok := freeBytes(folder); ok && free < leastFree {
			leastFree = free
		}
	}
	done := r.call.done
	for {
		select {
		case <-r.child.exited:
			return
		case <-done:
			done = nil
			r.end("", 0)
		case <-timeout:
			r.timedOut = r.endedFor == ""
			r.end("time", termGrace)
		case <-r.flooded:
			r.end("output", termGrace)
		case <-look:
			if free, ok := freeBytes(folder); ok && free < leastFree {
				r.end("disk", 0)
			}
		case <-r.kill:
			r.child.signal(syscall.SIGKILL)
		}
	}
}

// end asks once, and kills after the grace.
func (r *command) end(reason string, grace time.Duration) {
	if r.kill != nil && grace > 0 {
		return
	}
	if r.kill == nil {
		r.endedFor = reason
		r.child.signal(syscall.SIGTERM)
	}
	r.kill = time.After(grace)
}

func freeBytes(folder string) (uint64, bool) {
	var found syscall.Statfs_t
	err := syscall.Statfs(folder, &found)
	return found.Bavail * uint64(found.Bsize), err == nil
}

// drain takes the last output. A process that got away may hold a pipe open; its end is not awaited.
func (r *command) drain() {
	limit := time.Now().Add(drainTime)
	for i, out := range []*headTailBuffer{r.out, r.err} {
		if out != nil {
			_ = r.readers[i].SetReadDeadline(limit)
			<-out.finished
		}
	}
	closeAll(r.readers)
}

// report sends what was kept and says how it ended.
func (r *command) report() (*resultMessage, error) {
	c := r.call
	result := execResultMessage{timedOut: r.timedOut, endedFor: r.endedFor}
	result.setStatus(r.child.status)
	if r.child.hasRunOut {
		c.agent.event(&eventMessage{oom: &outOfMemoryMessage{c.id()}})
		// A shell that outlives the process tells of its end with this code.
		if result.signal == uint32(syscall.SIGKILL) || result.exitCode == killedInShell {
			result.endedFor = "memory"
		}
	}
	usage := usageOf(&r.child.usage)
	for i, out := range []*headTailBuffer{r.out, r.err} {
		if out == nil {
			continue
		}
		head, tail, bytes, lines := out.result()
		usage.bytesOut += uint64(len(head)+len(tail)) + bytes
		if i == 0 {
			result.droppedOut, result.droppedLinesOut = bytes, lines
		} else {
			result.droppedErr, result.droppedLnsErr = bytes, lines
		}
		for _, part := range [][]byte{head, tail} {
			if err := c.data(byte(1+i), part); err != nil {
				return nil, err
			}
		}
		c.endData(byte(1 + i))
	}
	return &resultMessage{exec: &result, usage: usage}, nil
}

func (m *execResultMessage) setStatus(status syscall.WaitStatus) {
	if status.Signaled() {
		m.signal = uint32(status.Signal())
	} else {
		m.exitCode = uint32(status.ExitStatus())
	}
}

func usageOf(found *syscall.Rusage) *usageMessage {
	micros := func(at syscall.Timeval) uint64 { return uint64(at.Sec)*1e6 + uint64(at.Usec) }
	return &usageMessage{
		cpuUs:       micros(found.Utime) + micros(found.Stime),
		maxRSSBytes: uint64(found.Maxrss) << 10,
	}
}
