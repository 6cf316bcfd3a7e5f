package main

import (
	"os"
	"sync"
	"syscall"
)

// A pipe takes this much at once, or nothing of it.
const maxJobInput = 4096

// jobInput is our end of the pipe that a job reads.
type jobInput struct {
	mu   sync.Mutex
	feed int
}

// open answers with the job's end, which is the caller's to close.
func (i *jobInput) open(isPipe bool) (int, error) {
	if !isPipe {
		return openAt(-100, os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	}
	var ends [2]int
	if err := syscall.Pipe2(ends[:], syscall.O_CLOEXEC); err != nil {
		return -1, err
	}
	i.mu.Lock()
	i.feed = ends[1]
	i.mu.Unlock()
	return ends[0], syscall.SetNonblock(ends[1], true)
}

// write gives the job all of it or refuses.
func (i *jobInput) write(data []byte, isLast bool) error {
	if len(data) > maxJobInput {
		return refusal{statusTooLarge, "too much input at once"}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.feed < 0 {
		return refusal{statusConflict, "its input has ended"}
	}
	if len(data) > 0 {
		_, err := syscall.Write(i.feed, data)
		switch err {
		case nil:
		case syscall.EAGAIN:
			return refusal{statusBusy, "it does not read its input"}
		case syscall.EPIPE:
			return refusal{statusConflict, "its input is not read"}
		default:
			return err
		}
	}
	if isLast {
		i.close()
	}
	return nil
}

func (i *jobInput) end() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.close()
}

func (i *jobInput) close() {
	if i.feed >= 0 {
		closeFd(i.feed)
		i.feed = -1
	}
}
