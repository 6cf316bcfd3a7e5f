package main

import (
	"encoding/binary"
	"os"
	"strings"
	"syscall"
	"unsafe"
)

const (
	vsockFamily  = 40 // AF_VSOCK
	vsockPort    = 1024
	vsockBacklog = 4
	anyone       = 0xFFFFFFFF // VMADDR_CID_ANY
	overVsock    = "envchannel=vsock"
)

// isOverVsock tells whether the VM's host asks for the agent there; the kernel was told so.
func isOverVsock() bool {
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return false
	}
	for _, word := range strings.Fields(string(line)) {
		if word == overVsock {
			return true
		}
	}
	return false
}

// serveVsock serves one host after the other on a port of the VM. A connection ends with every
// snapshot of the VM and the listener does not, so a host always finds the agent again.
func (a *agent) serveVsock(port uint32) error {
	listener, err := listenVsock(port)
	if err != nil {
		return os.NewSyscallError("vsock", err)
	}
	waiting, err := listener.SyscallConn()
	if err != nil {
		return err
	}
	return a.serveHosts(func() (connection, error) { return acceptVsock(waiting) })
}

func listenVsock(port uint32) (*os.File, error) {
	kind := syscall.SOCK_STREAM | syscall.SOCK_CLOEXEC | syscall.SOCK_NONBLOCK
	socket, err := syscall.Socket(vsockFamily, kind, 0)
	if err != nil {
		return nil, err
	}
	var address [16]byte
	binary.NativeEndian.PutUint16(address[:], vsockFamily)
	binary.NativeEndian.PutUint32(address[4:], port)
	binary.NativeEndian.PutUint32(address[8:], anyone)
	_, _, errno := syscall.Syscall(syscall.SYS_BIND, uintptr(socket),
		uintptr(unsafe.Pointer(&address[0])), uintptr(len(address)))
	if errno == 0 {
		_, _, errno = syscall.Syscall(syscall.SYS_LISTEN, uintptr(socket), vsockBacklog, 0)
	}
	if errno != 0 {
		closeFd(socket)
		return nil, errno
	}
	return os.NewFile(uintptr(socket), "vsock"), nil
}

func acceptVsock(waiting syscall.RawConn) (connection, error) {
	var accepted uintptr
	var errno syscall.Errno
	err := waiting.Read(func(listener uintptr) bool {
		for {
			accepted, _, errno = syscall.Syscall6(syscall.SYS_ACCEPT4, listener, 0, 0,
				syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0, 0)
			// A host that went away while it waited is not an error.
			if errno != syscall.EINTR && errno != syscall.ECONNABORTED {
				return errno != syscall.EAGAIN
			}
		}
	})
	if err != nil {
		return nil, err
	}
	if errno != 0 {
		return nil, errno
	}
	return os.NewFile(accepted, "host"), nil
}
