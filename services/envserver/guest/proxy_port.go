package main

import (
	"net"
	"strconv"
	"sync"
	"time"
)

// proxyPort is a port of the sandbox's own localhost whose connections the host takes, one call for each.
// It opens with the first of these calls: a template has none.
type proxyPort struct {
	mu      sync.Mutex
	port    uint32
	waiting chan *net.TCPConn
}

const acceptPause = 50 * time.Millisecond

func (d *proxyPort) open(port uint32) (<-chan *net.TCPConn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.waiting != nil {
		if d.port != port {
			return nil, refusal{statusInvalid, "the sandbox listens on another port"}
		}
		return d.waiting, nil
	}
	if port == 0 || port > 65535 {
		return nil, refusal{statusInvalid, "not a port"}
	}
	listener, err := net.Listen("tcp4", "127.0.0.1:"+strconv.FormatUint(uint64(port), 10))
	if err != nil {
		return nil, refusal{statusBusy, "a program of the sandbox has this port"}
	}
	d.port, d.waiting = port, make(chan *net.TCPConn)
	go d.take(listener, d.waiting)
	return d.waiting, nil
}

// take keeps one connection at hand; further ones wait in the kernel.
func (d *proxyPort) take(listener net.Listener, waiting chan<- *net.TCPConn) {
	for {
		accepted, err := listener.Accept()
		if err != nil {
			time.Sleep(acceptPause) // no descriptor is free
			continue
		}
		if connection, isTCP := accepted.(*net.TCPConn); isTCP {
			waiting <- connection
		}
	}
}

// accept carries one connection until both directions have ended, or the host wants it no more.
func (c *call) accept(m *acceptMessage) error {
	waiting, err := c.agent.proxy.open(m.port)
	if err != nil {
		return err
	}
	select {
	case connection := <-waiting:
		return c.carry(connection)
	case <-c.done:
		return c.stopError()
	}
}

func (c *call) carry(connection *net.TCPConn) error {
	c.put(typeData, 1<<channelShift, nil)
	c.flush()
	over, poured := make(chan struct{}), make(chan struct{})
	go func() {
		select {
		case <-c.done:
		case <-over:
		}
		_ = connection.Close()
	}()
	go func() {
		c.pour(connection)
		close(poured)
	}()
	err := c.draw(connection)
	<-poured
	close(over)
	if err == nil {
		err = c.stopError()
	}
	return err
}

// draw sends the host what the program says.
func (c *call) draw(connection *net.TCPConn) error {
	buffer := chunks.get()
	defer chunks.put(buffer)
	for {
		n, err := connection.Read(*buffer)
		if sent := c.data(1, (*buffer)[:n]); sent != nil {
			return sent
		}
		if err != nil {
			c.endData(1)
			c.flush()
			return nil
		}
		c.flush()
	}
}

// pour writes what the host says. A program that does not take it has gone.
func (c *call) pour(connection *net.TCPConn) {
	for {
		piece, err := c.receive(nil)
		if err != nil {
			return
		}
		if piece == nil {
			_ = connection.CloseWrite()
			return
		}
		if _, err := connection.Write(piece); err != nil {
			c.end(statusCancelled)
			return
		}
	}
}
