package main

import (
	"syscall"
	"unsafe"
)

const (
	addEntropy = 0x40085203 // RNDADDENTROPY
	reseed     = 0x5207     // RNDRESEEDCRNG
	freezeDisk = 0xC0045877 // FIFREEZE
	thawDisk   = 0xC0045878 // FITHAW
	realTime   = 0          // CLOCK_REALTIME

	maxMachineID = 32
	maxEntropy   = 64
)

// What every clone writes to when it becomes itself, opened before there are clones: what a clone
// does for the first time its host has to translate, and to open a file is most of the way.
var (
	randomDevice  = -1
	machineIDFile = -1
)

// openUnique opens them; what is missing is said by the first SYNC.
func openUnique() {
	randomDevice, _ = openAt(-100, "/dev/urandom", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	flags := syscall.O_WRONLY | syscall.O_CREAT | syscall.O_TRUNC | syscall.O_CLOEXEC
	machineIDFile, _ = openAt(-100, "/etc/machine-id", flags, 0o444)
}

// becomeUnique gives a clone its own clock, randomness and names; the answer is what failed.
func becomeUnique(m *syncMessage) []string {
	var failed []string
	if m.wallNs > 0 {
		failed = orFailed(failed, "clock", setClock(m.wallNs))
	}
	if len(m.entropy) > 0 {
		failed = orFailed(failed, "entropy", addRandomness(m.entropy))
	}
	if m.hostname != "" {
		name := unsafe.StringData(m.hostname)
		_, _, errno := syscall.RawSyscall(syscall.SYS_SETHOSTNAME,
			uintptr(unsafe.Pointer(name)), uintptr(len(m.hostname)), 0)
		failed = orFailed(failed, "hostname", errno)
	}
	if len(m.machineID) > 0 {
		failed = orFailed(failed, "machine-id", setMachineID(m.machineID))
	}
	return failed
}

func orFailed(failed []string, what string, errno syscall.Errno) []string {
	if errno == 0 {
		return failed
	}
	return append(failed, what+": "+errno.Error())
}

func setClock(wallNs uint64) syscall.Errno {
	now := syscall.NsecToTimespec(int64(wallNs))
	_, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_SETTIME, realTime, uintptr(unsafe.Pointer(&now)), 0)
	return errno
}

// setMachineID writes over the last one, which is as long.
func setMachineID(id []byte) syscall.Errno {
	const digits = "0123456789abcdef"
	var text [2*maxMachineID + 1]byte
	if len(id) > maxMachineID {
		return syscall.EINVAL
	}
	for i, each := range id {
		text[2*i], text[2*i+1] = digits[each>>4], digits[each&15]
	}
	text[2*len(id)] = '\n'
	_, _, errno := syscall.RawSyscall6(syscall.SYS_PWRITE64, uintptr(machineIDFile),
		uintptr(unsafe.Pointer(&text[0])), uintptr(2*len(id)+1), 0, 0, 0)
	return errno
}

// addRandomness credits the bytes to the kernel's generator and has it reseed from them at once.
func addRandomness(entropy []byte) syscall.Errno {
	var request struct {
		bits, size int32
		bytes      [maxEntropy]byte
	}
	request.size = int32(copy(request.bytes[:], entropy))
	request.bits = 8 * request.size
	_, _, errno := syscall.RawSyscall(syscall.SYS_IOCTL, uintptr(randomDevice), addEntropy,
		uintptr(unsafe.Pointer(&request)))
	if errno == 0 {
		_, _, errno = syscall.RawSyscall(syscall.SYS_IOCTL, uintptr(randomDevice), reseed, 0)
	}
	return errno
}

func orNil(errno syscall.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}

// freeze stops writes to the workspace's disk, or lets them go on. Only as the first process of a VM.
func (a *agent) freeze(isFrozen bool) error {
	if !a.isInit {
		return refusal{statusDenied, "only the first process of a VM freezes its disk"}
	}
	disk, err := openAt(-100, a.place.root, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer closeFd(disk)
	what := uintptr(thawDisk)
	if isFrozen {
		syscall.Sync()
		what = freezeDisk
	}
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(disk), what, 0)
	return orNil(errno)
}
