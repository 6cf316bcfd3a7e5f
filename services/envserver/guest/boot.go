package main

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

const (
	portName     = "agent.0"
	portInterval = 20 * time.Millisecond
	// What the kernel and the agent keep from the tools.
	reservedBytes = 64 << 20
	// Far above what commands may have: their own limit comes first, and memory.
	maxProcesses  = 32_768
	cgroupRoot    = "/sys/fs/cgroup"
	servicesPath  = "/etc/guestagent/services"
	servicesLimit = 2 * time.Minute
)

type mountPoint struct {
	source, target, kind string
	flags                uintptr
	options              string
}

var mountPoints = []mountPoint{
	{"proc", "/proc", "proc", syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC, ""},
	{"sysfs", "/sys", "sysfs", syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC, ""},
	{"devtmpfs", "/dev", "devtmpfs", syscall.MS_NOSUID, "mode=0755"},
	{"devpts", "/dev/pts", "devpts", syscall.MS_NOSUID | syscall.MS_NOEXEC, "mode=0620,ptmxmode=0666"},
	{"tmpfs", "/dev/shm", "tmpfs", syscall.MS_NOSUID | syscall.MS_NODEV, "mode=1777"},
	{"tmpfs", "/run", "tmpfs", syscall.MS_NOSUID | syscall.MS_NODEV, "mode=0755"},
	{"tmpfs", "/tmp", "tmpfs", syscall.MS_NOSUID | syscall.MS_NODEV, "mode=1777"},
	{"cgroup2", cgroupRoot, "cgroup2", syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC, ""},
}

// boot does the work of an init system for these tools.
func boot() error {
	for _, m := range mountPoints {
		_ = os.MkdirAll(m.target, 0o755)
		err := syscall.Mount(m.source, m.target, m.kind, m.flags, m.options)
		if err != nil && err != syscall.EBUSY {
			return errors.New("mount " + m.target + ": " + err.Error())
		}
	}
	for link, target := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0",
		"/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	} {
		_ = os.Symlink(target, link)
	}
	// Not -1000: children have this score until theirs is set, and the kernel needs a process to kill.
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0); err != nil {
		return err
	}
	loopbackUp()
	openUnique()
	if err := makeToolsCgroup(); err != nil {
		return err
	}
	return startServices(servicesPath)
}

// startServices begins what an image runs beside the tools. Its processes are in no cgroup of the
// tools, so nothing that ends commands ends them.
func startServices(script string) error {
	if _, err := os.Stat(script); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	limit, stop := context.WithTimeout(context.Background(), servicesLimit)
	defer stop()
	services := exec.CommandContext(limit, shellPath, "-e", script)
	services.Env = []string{"HOME=/root", "LANG=C.UTF-8", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	services.Dir = "/"
	services.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// The console, not a pipe: what is left running may hold it for ever.
	services.Stdout, services.Stderr = os.Stdout, os.Stderr
	if err := services.Run(); err != nil {
		return errors.New("services: " + err.Error())
	}
	return nil
}

func makeToolsCgroup() error {
	folder := cgroupRoot + "/tools"
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	limit := max(memoryBytes(), 2*reservedBytes) - reservedBytes
	for _, setting := range [][2]string{
		{cgroupRoot + "/cgroup.subtree_control", "+memory +pids +cpu"},
		{folder + "/memory.max", strconv.FormatUint(limit, 10)},
		{folder + "/pids.max", strconv.Itoa(maxProcesses)},
		{folder + "/cgroup.subtree_control", "+memory"},
	} {
		if err := os.WriteFile(setting[0], []byte(setting[1]), 0); err != nil {
			return err
		}
	}
	// Absent in kernels without swap.
	_ = os.WriteFile(folder+"/memory.swap.max", []byte("0"), 0)
	toolsCgroup = folder
	return nil
}

// loopbackUp lets programs of the sandbox talk to each other; there is no other network.
func loopbackUp() {
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer closeFd(socket)
	var request [40]byte
	copy(request[:], "lo")
	request[16] = syscall.IFF_UP
	_, _, _ = syscall.Syscall(syscall.SYS_IOCTL, uintptr(socket), syscall.SIOCSIFFLAGS,
		uintptr(unsafe.Pointer(&request[0])))
}

// openPort finds the host's port by its name, since its number depends on the order of discovery.
func openPort() *os.File {
	for ; ; time.Sleep(portInterval) {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil || strings.TrimSpace(string(text)) != portName {
				continue
			}
			device := "/dev/" + filepath.Base(filepath.Dir(name))
			if port, err := openAt(-100, device, syscall.O_RDWR|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0); err == nil {
				return os.NewFile(uintptr(port), device)
			}
		}
	}
}

func bootID() []byte {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err == nil {
		return []byte(strings.TrimSpace(string(text)))
	}
	random := make([]byte, 16)
	_, _ = rand.Read(random)
	return random
}

func memoryBytes() uint64 {
	var info syscall.Sysinfo_t
	if syscall.Sysinfo(&info) != nil {
		return 0
	}
	return info.Totalram * uint64(info.Unit)
}

// capabilities are what differs from one place to another.
func capabilities(isInit bool) []string {
	if isInit {
		return []string{"init", "cgroup", "freeze"}
	}
	return nil
}
