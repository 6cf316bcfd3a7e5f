package main

import (
	"io"
	"sync"
)

// port is the one byte stream to the host. Frames are written whole, one writer at a time.
type port struct {
	mu    sync.Mutex
	write io.Writer
	// Told of each frame; false says that it was none.
	take func(frame) bool
}

// send writes frames unless the call they belong to was ended by a RESET meanwhile: after the
// RESET_ACK nothing of the old epoch may follow, since stream numbers begin again.
func (p *port) send(frames []byte, isOver func() bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.write != nil && (isOver == nil || !isOver()) {
		// A broken port ends the reader too, which knows what to do.
		_, _ = p.write.Write(frames)
	}
}

// connect sets where frames go; nil drops them.
func (p *port) connect(to io.Writer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.write = to
}

// read takes frames until the stream ends.
func (p *port) read(from io.Reader, parse *parser) error {
	parse.drop()
	for {
		n, err := from.Read(parse.room())
		parse.added(n)
		for {
			next, ok := parse.next()
			if !ok {
				break
			}
			if !p.take(next) {
				parse.scan()
			}
		}
		if err != nil {
			return err
		}
	}
}
