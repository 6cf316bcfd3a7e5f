package main

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

const (
	window = 256 << 10
	// A sum of credits stops here, however many a peer sends.
	maxCredit = 1 << 31
	idBytes   = 16
)

// call is one request and the stream it is answered on.
type call struct {
	agent   *agent
	stream  uint32
	request callMessage
	timer   *time.Timer
	// Frames that wait for more of their kind or for the result, in a buffer that is lent.
	out  []byte
	lent *[]byte
	kept *keptFrames
	sent atomic.Uint64

	// Closed when the call is to end before its time.
	done chan struct{}
	// Told when credit has come, and when data has.
	credited, arrived chan struct{}

	// Guarded by the port's lock.
	isOver bool

	// Below: guarded by mu.
	mu          sync.Mutex
	why         status
	credit      int64
	inbox       [][]byte
	inboxBytes  int
	unreturned  int
	hasAll      bool
	isViolated  bool
	signalTaker func(uint32)
}

func (c *call) id() []byte { return c.request.id }

// open begins a call, or keeps one of its parts.
func (a *agent) open(f frame) bool {
	a.mu.Lock()
	part, isOpen := a.parts[f.stream]
	_, isRunning := a.calls[f.stream]
	if f.stream == 0 || isRunning || !isOpen && f.stream <= a.lastStream || len(part)+len(f.payload) > maxCallBytes {
		a.mu.Unlock()
		return false // streams are never used again within an epoch
	}
	if !isOpen {
		a.lastStream = f.stream
	}
	if f.flags&flagMore != 0 {
		if !isOpen && len(a.parts) >= maxOpenCalls {
			a.mu.Unlock()
			return false
		}
		a.parts[f.stream] = append(part, f.payload...)
		a.mu.Unlock()
		return true
	}
	delete(a.parts, f.stream)
	c := &call{
		agent: a, stream: f.stream, credit: window,
		done: make(chan struct{}), credited: make(chan struct{}, 1), arrived: make(chan struct{}, 1),
	}
	a.calls[f.stream] = c
	numOpen := len(a.calls)
	a.mu.Unlock()
	payload := f.payload
	if isOpen {
		payload = append(part, payload...)
	}
	c.begin(payload, numOpen)
	return true
}

// begin runs the call, or refuses it. Short calls have ended when this returns.
func (c *call) begin(payload []byte, numOpen int) {
	if err := decode(payload, &c.request); err != nil || len(c.id()) != idBytes {
		c.refuse(statusInvalid, "not a call")
		return
	}
	if !c.agent.admits(c.request.token) {
		c.refuse(statusDenied, "not the token of this generation")
		return
	}
	if answer, isKnown := c.agent.earlier(c); answer != nil {
		c.close(answer)
		return
	} else if isKnown {
		c.refuse(statusBusy, "the call with this id still runs")
		return
	}
	if numOpen > maxOpenCalls {
		c.abandon(statusBusy, "too many open calls")
		return
	}
	if limit := c.request.deadlineMs; limit > 0 {
		c.timer = time.AfterFunc(time.Duration(limit)*time.Millisecond, func() { c.end(statusTimeout) })
	}
	c.agent.workers.run(c)
	// With one processor the call runs now, and most have answered before the port is read again.
	runtime.Gosched()
}

func (c *call) run() {
	if !c.request.isShort() {
		c.agent.port.flush()
	}
	result, err := c.perform()
	switch {
	case err != nil:
		result = failure(err)
	case result == nil:
		result = &resultMessage{status: statusOK}
	case result.status == 0:
		result.status = statusOK
	}
	if c.timer != nil {
		c.timer.Stop()
	}
	c.finish(result)
}

// end asks the call to stop; the first reason counts.
func (c *call) end(why status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.why == 0 {
		c.why = why
		close(c.done)
	}
}

// stopped is why the call must not go on, or nil.
func (c *call) stopError() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isViolated {
		return refusal{statusInvalid, "more data than there was credit for"}
	}
	if c.why != 0 {
		return refusal{c.why, ""}
	}
	return nil
}

func nudge(waiting chan struct{}) {
	select {
	case waiting <- struct{}{}:
	default:
	}
}

func (c *call) addCredit(credit uint32) {
	c.mu.Lock()
	c.credit = min(c.credit+int64(credit), maxCredit)
	c.mu.Unlock()
	nudge(c.credited)
}

func (c *call) deliverSignal(number uint32) {
	c.mu.Lock()
	taker := c.signalTaker
	c.mu.Unlock()
	if taker != nil && number < 65 {
		taker(number)
	}
}

func (c *call) takeSignals(taker func(uint32)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.signalTaker = taker
}
