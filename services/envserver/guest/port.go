package main

import (
	"io"
	"sync"
	"sync/atomic"
)

// maxHeld is what the kernel's driver of a port sends at a time.
const maxHeld = 32 << 10

// port is the one byte stream to the host. Frames are written whole, one writer at a time. What
// frames that came together are answered with leaves together: in a VM each write is an exit,
// an interrupt and a look at what has happened, which costs more than most answers.
type port struct {
	mu    sync.Mutex
	write io.Writer
	held  []byte
	// Told of each frame; false says that it was none.
	take func(frame) bool

	// Read without the lock: a host that takes nothing must not keep its frames from being taken.
	isTaking, isHolding atomic.Bool
}

// send writes frames unless the call they belong to was ended by a RESET meanwhile: after the
// RESET_ACK nothing of the old epoch may follow, since stream numbers begin again.
func (p *port) send(frames []byte, isOver func() bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.write == nil || isOver != nil && isOver() {
		return
	}
	if len(p.held)+len(frames) > maxHeld {
		p.release()
	}
	if len(frames) > maxHeld {
		p.put(frames)
		return
	}
	if p.held == nil {
		p.held = make([]byte, 0, maxHeld)
	}
	p.held = append(p.held, frames...)
	p.isHolding.Store(true)
	if !p.isTaking.Load() {
		p.release()
	}
}

// flush writes what is held: no more is to come, or something that may take long.
func (p *port) flush() {
	if p.isHolding.Load() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.release()
	}
}

func (p *port) release() {
	p.isHolding.Store(false)
	if len(p.held) > 0 {
		p.put(p.held)
	}
	p.held = p.held[:0]
}

func (p *port) put(frames []byte) {
	// A broken port ends the reader too, which knows what to do.
	_, _ = p.write.Write(frames)
}

// connect sets where frames go; nil drops them. What is held was for an earlier host.
func (p *port) connect(to io.Writer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.write, p.held = to, p.held[:0]
	p.isHolding.Store(false)
}

// read takes frames until the stream ends.
func (p *port) read(from io.Reader, parse *parser) error {
	parse.drop()
	for {
		n, err := from.Read(parse.room())
		parse.advance(n)
		p.takeAll(parse)
		if err != nil {
			return err
		}
	}
}

// takeAll takes the frames that are complete, and then writes what they were answered with.
func (p *port) takeAll(parse *parser) {
	p.isTaking.Store(true)
	for {
		next, ok := parse.next()
		if !ok {
			break
		}
		if !p.take(next) {
			parse.scan()
		}
	}
	p.isTaking.Store(false)
	p.flush()
}
