package main

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// toolsCgroup is the folder of the group that all tools are in; empty where the agent is not the
// first process of its VM.
var toolsCgroup string

var numCgroups atomic.Uint64

// cgroup is one command's group; nil stands for none.
type cgroup struct{ folder string }

func newCgroup() *cgroup {
	if toolsCgroup == "" {
		return nil
	}
	folder := toolsCgroup + "/c" + strconv.FormatUint(numCgroups.Add(1), 10)
	if os.Mkdir(folder, 0o755) != nil {
		return nil
	}
	return &cgroup{folder}
}

// admit has the child be born in the group; the descriptor is closed once it is, if there is one.
func (g *cgroup) admit(attributes *syscall.SysProcAttr) int {
	if g == nil {
		return -1
	}
	folder, err := openAt(-100, g.folder, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	attributes.UseCgroupFD, attributes.CgroupFD = true, folder
	return folder
}

// members are the processes of the group.
func (g *cgroup) members() []int {
	if g == nil {
		return nil
	}
	text, err := os.ReadFile(g.folder + "/cgroup.procs")
	if err != nil {
		return nil
	}
	var found []int
	for _, line := range strings.Fields(string(text)) {
		if pid, err := strconv.Atoi(line); err == nil {
			found = append(found, pid)
		}
	}
	return found
}

func (g *cgroup) kill() {
	if g != nil {
		_ = os.WriteFile(g.folder+"/cgroup.kill", []byte("1"), 0)
	}
}

func (g *cgroup) remove() {
	if g != nil {
		_ = os.Remove(g.folder)
	}
}

// hasRunOut is whether the kernel ended a process of the group for want of memory.
func (g *cgroup) hasRunOut() bool {
	if g == nil {
		return false
	}
	text, err := os.ReadFile(g.folder + "/memory.events")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(text)) {
		if count, ok := strings.CutPrefix(line, "oom_kill "); ok {
			return strings.TrimSpace(count) != "0"
		}
	}
	return false
}
