package main

import "sync"

// pool lends buffers of one size. Memory that is used again stays the same pages, and pages that
// are not written to are shared by all clones of a snapshot.
type pool struct {
	size int
	mu   sync.Mutex
	free []*[]byte
}

const maxFree = 4

var chunks = pool{size: maxPayload}

// outs hold the frames of one call until they are many: less than a payload, and the next.
var outs = pool{size: 2*maxPayload + 16*headerBytes}

func (p *pool) get() *[]byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		buffer := p.free[n-1]
		p.free = p.free[:n-1]
		return buffer
	}
	buffer := make([]byte, p.size)
	return &buffer
}

func (p *pool) put(buffer *[]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) < maxFree {
		p.free = append(p.free, buffer)
	}
}
