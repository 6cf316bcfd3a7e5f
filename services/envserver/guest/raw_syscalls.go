package main

import (
	"io"
	"syscall"
	"unsafe"
)

// System calls that the scheduler is not told of. They are short, and telling it would wake the
// monitor thread of Go's runtime, which then looks every 20 microseconds whether they are: with one
// slow processor that costs more than the calls themselves.

func openAt(folder int, name string, flags int, mode uint32) (int, error) {
	text, err := syscall.BytePtrFromString(name)
	if err != nil {
		return -1, err
	}
	for {
		opened, _, errno := syscall.RawSyscall6(syscall.SYS_OPENAT, uintptr(folder),
			uintptr(unsafe.Pointer(text)), uintptr(flags), uintptr(mode), 0, 0)
		if errno == 0 {
			return int(opened), nil
		}
		if errno != syscall.EINTR {
			return -1, errno
		}
	}
}

func closeFd(descriptor int) {
	_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, uintptr(descriptor), 0, 0)
}

// statAt looks at a name without following a link; an empty name is the folder itself.
func statAt(folder int, name string) (syscall.Stat_t, error) {
	var found syscall.Stat_t
	if name == "" {
		name = "."
	}
	text, err := syscall.BytePtrFromString(name)
	if err != nil {
		return found, err
	}
	_, _, errno := syscall.RawSyscall6(syscall.SYS_NEWFSTATAT, uintptr(folder),
		uintptr(unsafe.Pointer(text)), uintptr(unsafe.Pointer(&found)), noFollow, 0, 0)
	return found, orNil(errno)
}

func statFd(file int, found *syscall.Stat_t) error {
	_, _, errno := syscall.RawSyscall(syscall.SYS_FSTAT, uintptr(file), uintptr(unsafe.Pointer(found)), 0)
	return orNil(errno)
}

// readAt reads at an offset, or from where the file stands if that is negative.
func readAt(file int, into []byte, offset int64) (int, error) {
	if len(into) == 0 {
		return 0, nil
	}
	number := uintptr(syscall.SYS_PREAD64)
	if offset < 0 {
		number = syscall.SYS_READ
	}
	for {
		n, _, errno := syscall.RawSyscall6(number, uintptr(file),
			uintptr(unsafe.Pointer(&into[0])), uintptr(len(into)), uintptr(offset), 0, 0)
		if errno == 0 {
			return int(n), nil
		}
		if errno != syscall.EINTR {
			return 0, errno
		}
	}
}

func writeAll(file int, data []byte) error {
	for len(data) > 0 {
		n, _, errno := syscall.RawSyscall(syscall.SYS_WRITE, uintptr(file),
			uintptr(unsafe.Pointer(&data[0])), uintptr(len(data)))
		if errno == 0 {
			data = data[n:]
		} else if errno != syscall.EINTR {
			return errno
		}
	}
	return nil
}

// readNames fills the buffer with entries of a folder.
func readNames(folder int, into []byte) (int, error) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_GETDENTS64, uintptr(folder),
		uintptr(unsafe.Pointer(&into[0])), uintptr(len(into)))
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// pipe is a byte stream to the host that does not block; waiting is left to the runtime.
type pipe struct{ descriptor syscall.RawConn }

func newPipe(from syscall.Conn) (pipe, error) {
	descriptor, err := from.SyscallConn()
	return pipe{descriptor}, err
}

func (p pipe) Read(into []byte) (int, error) {
	var n int
	var failed error
	err := p.descriptor.Read(func(descriptor uintptr) bool {
		n, failed = readAt(int(descriptor), into, -1)
		return failed != syscall.EAGAIN
	})
	if err == nil {
		err = failed
	}
	if err == nil && n == 0 {
		err = io.EOF
	}
	return n, err
}

func (p pipe) Write(data []byte) (int, error) {
	sent := 0
	var failed error
	err := p.descriptor.Write(func(descriptor uintptr) bool {
		for sent < len(data) {
			n, _, errno := syscall.RawSyscall(syscall.SYS_WRITE, descriptor,
				uintptr(unsafe.Pointer(&data[sent])), uintptr(len(data)-sent))
			switch errno {
			case 0:
				sent += int(n)
			case syscall.EINTR:
			case syscall.EAGAIN:
				return false
			default:
				failed = errno
				return true
			}
		}
		return true
	})
	if err == nil {
		err = failed
	}
	return sent, err
}

const removeFolder = 0x200

// removeFolderAt removes an empty folder.
func removeFolderAt(folder int, name string) error {
	text, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, errno := syscall.RawSyscall(syscall.SYS_UNLINKAT, uintptr(folder),
		uintptr(unsafe.Pointer(text)), removeFolder)
	return orNil(errno)
}
