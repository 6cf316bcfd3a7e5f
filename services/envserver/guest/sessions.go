package main

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const maxSessions = 16

// shell is a named session: one /bin/sh that runs command after command and keeps its folder and
// variables. Its own errors are a pipe on which it tells the end of each; commands have another.
type shell struct {
	// Held by the command that runs in it.
	busy   sync.Mutex
	child  *process
	lines  *os.File
	output *os.File
	status *os.File
}

// sessions are the open shells by name.
type sessions struct {
	mu    sync.Mutex
	named map[string]*shell
}

func (s *sessions) find(name string) *shell {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.named[name]
}

// take removes a shell, unless another one has its name by now.
func (s *sessions) take(name string, which *shell) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.named[name] == which {
		delete(s.named, name)
	}
}

func (c *call) session(at place, m *sessionMessage) error {
	all := &c.agent.shells
	if m.close {
		found := all.find(m.name)
		if found == nil {
			return refusal{statusNotFound, "no such session"}
		}
		all.take(m.name, found)
		found.end()
		return nil
	}
	all.mu.Lock()
	defer all.mu.Unlock()
	if all.named == nil {
		all.named = map[string]*shell{}
	}
	if m.name == "" || all.named[m.name] != nil || len(all.named) >= maxSessions {
		return refusal{statusInvalid, "no name for a session, one that is taken, or too many of them"}
	}
	made, err := newShell(program{
		path: shellPath, argv: []string{"sh"}, env: environment(m.env), dir: at.root, uid: c.user(),
	})
	if err == nil {
		all.named[m.name] = made
	}
	return err
}

func newShell(what program) (*shell, error) {
	var ours, theirs [3]*os.File
	for i := range ours {
		reader, writer, err := os.Pipe()
		if err != nil {
			closeAll(append(ours[:], theirs[:]...))
			return nil, err
		}
		ours[i], theirs[i] = reader, writer
	}
	// The first pipe goes the other way.
	ours[0], theirs[0] = theirs[0], ours[0]
	what.files = []uintptr{theirs[0].Fd(), theirs[1].Fd(), theirs[2].Fd()}
	child, err := start(what)
	closeAll(theirs[:])
	if err != nil {
		closeAll(ours[:])
		return nil, err
	}
	return &shell{child: child, lines: ours[0], output: ours[1], status: ours[2]}, nil
}

// end kills the shell and all that runs in it.
func (s *shell) end() {
	s.child.signal(syscall.SIGKILL)
	<-s.child.exited
	s.child.killRest()
	closeAll([]*os.File{s.lines, s.output, s.status})
}

func (c *call) execInSession(m *execMessage) (*resultMessage, error) {
	found := c.agent.shells.find(m.session)
	if found == nil {
		return nil, refusal{statusNotFound, "no such session"}
	}
	if len(m.shell) == 0 || m.background {
		return nil, refusal{statusInvalid, "a session runs a line in the foreground"}
	}
	if !found.busy.TryLock() {
		return nil, refusal{statusBusy, "the session runs another command"}
	}
	defer found.busy.Unlock()
	return c.runInShell(found, m)
}

func (c *call) runInShell(s *shell, m *execMessage) (*resultMessage, error) {
	flooded := make(chan struct{}, 1)
	out := newHeadTailBuffer(int(min(m.headBytes, maxKeptPart)), int(min(m.tailBytes, maxKeptPart)), 0, flooded)
	_ = s.output.SetReadDeadline(time.Time{})
	go out.pump(s.output)
	ended := make(chan string, 1)
	go s.tell(m.shell, ended)
	var timeout <-chan time.Time
	if m.timeoutMs > 0 {
		timer := time.NewTimer(time.Duration(m.timeoutMs) * time.Millisecond)
		defer timer.Stop()
		timeout = timer.C
	}
	c.takeSignals(func(number uint32) { s.child.signal(syscall.Signal(number)) })
	defer c.takeSignals(nil)
	result := execResultMessage{}
	isOver := false
	select {
	case line := <-ended:
		code, err := strconv.ParseUint(strings.TrimSpace(line), 10, 8)
		result.exitCode = uint32(code)
		isOver = err != nil
	case <-timeout:
		result.timedOut, result.endedFor, isOver = true, "time", true
	case <-c.done:
		isOver = true
	}
	s.settle(out)
	if isOver {
		// The shell itself has ended or must: its next command would find it in the middle of this one.
		c.agent.shells.take(m.session, s)
		s.end()
		result.setStatus(s.child.status)
	}
	head, tail, dropped, lines := out.result()
	result.droppedOut, result.droppedLinesOut = dropped, lines
	for _, part := range [][]byte{head, tail} {
		if err := c.data(1, part); err != nil {
			return nil, err
		}
	}
	c.endData(1)
	return &resultMessage{exec: &result}, nil
}

// tell gives the shell one command and answers with its exit status as text, empty when the shell
// has ended.
func (s *shell) tell(line []byte, ended chan<- string) {
	quoted := "'" + strings.ReplaceAll(string(line), "'", `'\''`) + "'"
	_, err := s.lines.WriteString("eval " + quoted + " </dev/null 2>&1\nprintf '%d\\n' $? >&2\n")
	var status [16]byte
	n := 0
	if err == nil {
		n, _ = s.status.Read(status[:])
	}
	ended <- string(status[:n])
}

// settle takes the output that the shell wrote before it told its end.
func (s *shell) settle(out *headTailBuffer) {
	_ = s.output.SetReadDeadline(time.Now())
	<-out.finished
	raw, err := s.output.SyscallConn()
	if err != nil {
		return
	}
	_ = s.output.SetReadDeadline(time.Time{})
	buffer := chunks.get()
	defer chunks.put(buffer)
	_ = raw.Read(func(descriptor uintptr) bool {
		for range maxSettled {
			n, err := syscall.Read(int(descriptor), *buffer)
			if n <= 0 || err != nil {
				break
			}
			out.add((*buffer)[:n])
		}
		return true
	})
}

// maxSettled bounds the reads of settle: background processes of the shell may write for ever.
const maxSettled = 16
