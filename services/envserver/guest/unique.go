package main

import (
	"encoding/binary"
	"encoding/hex"
	"os"
	"syscall"
	"unsafe"
)

const (
	addEntropy = 0x40085203 // RNDADDENTROPY
	reseed     = 0x5207     // RNDRESEEDCRNG
	freezeDisk = 0xC0045877 // FIFREEZE
	thawDisk   = 0xC0045878 // FITHAW
	realTime   = 0          // CLOCK_REALTIME
)

// becomeUnique gives a clone its own clock, randomness and names; the answer is what failed.
func becomeUnique(m *syncMessage) []string {
	var failed []string
	try := func(what string, err error) {
		if err != nil {
			failed = append(failed, what+": "+err.Error())
		}
	}
	if m.wallNs > 0 {
		try("clock", setClock(m.wallNs))
	}
	if len(m.entropy) > 0 {
		try("entropy", addRandomness(m.entropy))
	}
	if m.hostname != "" {
		try("hostname", syscall.Sethostname([]byte(m.hostname)))
	}
	if len(m.machineID) > 0 {
		text := hex.EncodeToString(m.machineID) + "\n"
		try("machine-id", os.WriteFile("/etc/machine-id", []byte(text), 0o444))
	}
	return failed
}

func setClock(wallNs uint64) error {
	now := syscall.NsecToTimespec(int64(wallNs))
	_, _, errno := syscall.Syscall(syscall.SYS_CLOCK_SETTIME, realTime, uintptr(unsafe.Pointer(&now)), 0)
	return orNil(errno)
}

// addRandomness credits the bytes to the kernel's generator and has it reseed from them at once.
func addRandomness(entropy []byte) error {
	device, err := os.OpenFile("/dev/urandom", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer device.Close()
	var request []byte
	request = binary.NativeEndian.AppendUint32(request, uint32(8*len(entropy)))
	request = binary.NativeEndian.AppendUint32(request, uint32(len(entropy)))
	request = append(request, entropy...)
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, device.Fd(), addEntropy, uintptr(unsafe.Pointer(&request[0])))
	if errno == 0 {
		_, _, errno = syscall.Syscall(syscall.SYS_IOCTL, device.Fd(), reseed, 0)
	}
	return orNil(errno)
}

func orNil(errno syscall.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}

// freeze stops writes to the workspace's disk, or lets them go on. Only where the machine is ours.
func (a *agent) freeze(isFrozen bool) error {
	if !a.isInit {
		return refusal{statusDenied, "only the first process of a machine freezes its disk"}
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
