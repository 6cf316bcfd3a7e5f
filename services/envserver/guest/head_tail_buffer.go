package main

import (
	"bytes"
	"io"
	"sync"
)

// headTailBuffer holds the beginning and the end of a stream of any length, in bounded memory.
type headTailBuffer struct {
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

func newHeadTailBuffer(head, tail int, floodBytes uint64, flooded chan<- struct{}) *headTailBuffer {
	return &headTailBuffer{
		headBytes: head, tailBytes: tail, floodBytes: floodBytes, flooded: flooded,
		finished: make(chan struct{}),
	}
}

// pump reads until the last writer has closed.
func (k *headTailBuffer) pump(from io.Reader) {
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
func (k *headTailBuffer) add(data []byte) bool {
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
func (k *headTailBuffer) result() (head, tail []byte, bytesDropped, linesDropped uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	tail = k.tail[max(0, len(k.tail)-k.tailBytes):]
	lines := uint64(bytes.Count(tail, []byte("\n")))
	return k.head, tail, k.afterHead - uint64(len(tail)), k.lines - lines
}
