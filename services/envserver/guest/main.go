// Command guestagent is the one program of ours inside a sandbox: it does what the host asks over a
// single byte stream. As the first process of a VM it also boots it.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"syscall"
	"time"
)

const (
	toolsUser   = 1000
	memoryLimit = 24 << 20
	reconnect   = 20 * time.Millisecond

	childSubreaper = 36
	noNewPrivs     = 38
)

func main() {
	root := flag.String("root", "/workspace", "the workspace")
	state := flag.String("state", "/run/guestagent", "folder for the logs of background jobs")
	uid := flag.Int("uid", -1, "user of commands and files; -1 is the agent's own, or 1000 as process 1")
	stdio := flag.Bool("stdio", false, "serve one host on standard input and output")
	socket := flag.String("socket", "", "serve one host after the other on a Unix socket")
	vsock := flag.Uint("vsock", 0, "serve one host after the other on this port of the VM; "+
		"as process 1 it does so where the kernel was told "+overVsock)
	flag.Parse()
	// A clone shares the pages that are not written to: one processor, and no collector that marks
	// them, until memory is short.
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(memoryLimit)
	if err := serve(*root, *state, *uid, *stdio, *socket, uint32(*vsock)); err != nil {
		fmt.Fprintln(os.Stderr, "guestagent:", err)
		os.Exit(1)
	}
}

func serve(root, state string, uid int, stdio bool, socket string, vsock uint32) error {
	isInit := os.Getpid() == 1 && !stdio && socket == "" && vsock == 0
	if isInit {
		if err := boot(); err != nil {
			return err
		}
		if uid < 0 {
			uid = toolsUser
		}
	}
	if _, _, errno := syscall.AllThreadsSyscall(syscall.SYS_PRCTL, childSubreaper, 1, 0); errno != 0 {
		return errno
	}
	if _, _, errno := syscall.AllThreadsSyscall6(syscall.SYS_PRCTL, noNewPrivs, 1, 0, 0, 0, 0); errno != 0 {
		return errno
	}
	reap()
	a := newAgent(root, state, uid, isInit)
	switch {
	case stdio:
		return a.serveStdio()
	case socket != "":
		return a.serveSocket(socket)
	case vsock != 0:
		return a.serveVsock(vsock)
	case isInit && isOverVsock():
		return a.serveVsock(vsockPort)
	case isInit:
		return a.servePort()
	}
	return errors.New("not the first process: use --stdio, --socket or --vsock")
}

// serveStdio keeps the two streams from children, which write to pipes of their own.
func (a *agent) serveStdio() error {
	var streams [2]pipe
	for i := range streams {
		moved, err := syscall.Dup(i)
		if err != nil {
			return err
		}
		syscall.CloseOnExec(moved)
		if err := syscall.SetNonblock(moved, true); err != nil {
			return err
		}
		if streams[i], err = newPipe(os.NewFile(uintptr(moved), "stdio")); err != nil {
			return err
		}
	}
	a.port.connect(streams[1])
	a.hello()
	err := a.port.read(streams[0], &parser{})
	killAll()
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// serveSocket serves one host after the other on a Unix socket.
func (a *agent) serveSocket(path string) error {
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	return a.serveHosts(func() (connection, error) {
		accepted, err := listener.Accept()
		if err != nil {
			return nil, err
		}
		found, isUnix := accepted.(*net.UnixConn)
		if !isUnix {
			return nil, errors.New("not a Unix socket")
		}
		return found, nil
	})
}

type connection interface {
	syscall.Conn
	io.Closer
}

// serveHosts serves each host that connects, and says HELLO to the first.
func (a *agent) serveHosts(accept func() (connection, error)) error {
	parse := &parser{}
	for isFirst := true; ; isFirst = false {
		accepted, err := accept()
		if err != nil {
			return err
		}
		host, err := newPipe(accepted)
		if err != nil {
			return err
		}
		a.port.connect(host)
		if isFirst {
			a.hello()
		}
		_ = a.port.read(host, parse)
		a.port.connect(nil)
		_ = accepted.Close()
	}
}

// servePort stays on the port for as long as the VM lives: while no host is connected, reads
// find an end, and a new host begins with a RESET.
func (a *agent) servePort() error {
	port, err := newPipe(openPort())
	if err != nil {
		return err
	}
	a.port.connect(port)
	go a.hello()
	parse := &parser{}
	for {
		_ = a.port.read(port, parse)
		time.Sleep(reconnect)
	}
}
