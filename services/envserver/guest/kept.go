package main

import (
	"bytes"
	"io"
	"sync"
)

// kept is the beginning and the end of a stream of any length, in bounded memory.
type kept struct {
	headBytes, tailBytes int
	// Told once, when more than this many bytes have come.
	floodBytes uint64
	flooded    chan<- struct{}

	mu         sync.Mutex
	head, tail []byte
	afterHead  uint64
	lines      uint64
	finished   chan struct{}
}

func newKept(head, tail int, floodBytes uint64, flooded chan<- struct{}) *kept {
	return &kept{
		headBytes: head, tailBytes: tail, floodBytes: floodBytes, flooded: flooded,
		finished: make(chan struct{}),
	}
}

// pump reads until nobody writes any more.
func (k *kept) pump(from io.Reader) {
	buffer := chunks.get()
	defer chunks.put(buffer)
	defer close(k.finished)
	for {
		n, err := from.Read(*buffer)
		if n > 0 && k.add((*buffer)[:n]) {
			select {
			case k.flooded <- struct{}{}:
			default:
			}
		}
		if err != nil {
			return
		}
	}
}

// add takes the next piece, and answers whether there is too much by now.
func (k *kept) add(data []byte) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if room := k.headBytes - len(k.head); room > 0 {
		n := min(room, len(data))
		k.head = append(k.head, data[:n]...)
		data = data[n:]
	}
	k.afterHead += uint64(len(data))
	k.lines += uint64(bytes.Count(data, []byte("\n")))
	k.tail = append(k.tail, data...)
	if len(k.tail) > 2*k.tailBytes+maxPayload {
		k.tail = append(k.tail[:0], k.tail[len(k.tail)-k.tailBytes:]...)
	}
	return k.floodBytes > 0 && k.afterHead+uint64(len(k.head)) > k.floodBytes
}

// result is what was kept, and how many bytes and line ends are missing between the two parts.
func (k *kept) result() (head, tail []byte, bytesDropped, linesDropped uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	tail = k.tail[max(0, len(k.tail)-k.tailBytes):]
	lines := uint64(bytes.Count(tail, []byte("\n")))
	return k.head, tail, k.afterHead - uint64(len(tail)), k.lines - lines
}
