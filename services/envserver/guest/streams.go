package main

import "slices"

// received keeps data of the host until the call asks for it; false for data without credit.
func (c *call) received(f frame) bool {
	if f.flags>>channelShift&channelMask != 0 {
		return false
	}
	c.mu.Lock()
	if c.hasAll || c.inboxBytes+c.unreturned+len(f.payload) > window {
		c.isViolated = true
		c.mu.Unlock()
		c.end(statusInvalid)
		return true
	}
	if len(f.payload) > 0 {
		c.inbox = append(c.inbox, slices.Clone(f.payload))
		c.inboxBytes += len(f.payload)
	}
	c.hasAll = f.flags&flagEnd != 0
	c.mu.Unlock()
	nudge(c.arrived)
	return true
}

// receive is the next piece of the host's data, nil after the last and once the call has stopped.
func (c *call) receive(enough <-chan struct{}) ([]byte, error) {
	for {
		if err := c.stopError(); err != nil {
			return nil, err
		}
		c.mu.Lock()
		if len(c.inbox) > 0 {
			piece := c.inbox[0]
			c.inbox = c.inbox[1:]
			c.inboxBytes -= len(piece)
			c.unreturned += len(piece)
			isLate := c.unreturned >= window/2
			credit := c.unreturned
			if isLate {
				c.unreturned = 0
			}
			c.mu.Unlock()
			if isLate {
				c.grant(credit)
			}
			return piece, nil
		}
		hasAll := c.hasAll
		c.mu.Unlock()
		if hasAll {
			return nil, nil
		}
		select {
		case <-c.arrived:
		case <-c.done:
		case <-enough:
			return nil, nil
		}
	}
}

func (c *call) grant(credit int) {
	payload := []byte{byte(credit), byte(credit >> 8), byte(credit >> 16), byte(credit >> 24)}
	c.agent.port.send(appendFrame(nil, c.stream, typeCredit, 0, payload), func() bool { return c.isOver })
}

// data sends bytes of one channel as the host's credit allows.
func (c *call) data(channel byte, piece []byte) error {
	for len(piece) > 0 {
		n, err := c.takeCredit(min(len(piece), maxPayload))
		if err != nil {
			return err
		}
		c.put(typeData, channel<<channelShift, piece[:n])
		piece = piece[n:]
		if len(c.out) >= maxPayload {
			c.flush()
		}
	}
	return nil
}

// endData says that a channel has no more.
func (c *call) endData(channel byte) { c.put(typeData, channel<<channelShift|flagEnd, nil) }

func (c *call) put(kind, flags byte, payload []byte) {
	if c.lent == nil {
		c.lent = outs.get()
		c.out = (*c.lent)[:0]
	}
	c.out = appendFrame(c.out, c.stream, kind, flags, payload)
	c.kept.add(kind, flags, payload)
	if kind == typeData {
		c.sent.Add(uint64(len(payload)))
	}
}

func (c *call) flush() {
	c.agent.port.send(c.out, func() bool { return c.isOver })
	c.out = c.out[:0]
}

func (c *call) takeCredit(wanted int) (int, error) {
	for {
		if err := c.stopError(); err != nil {
			return 0, err
		}
		c.mu.Lock()
		n := int(min(int64(wanted), c.credit))
		c.credit -= int64(n)
		c.mu.Unlock()
		if n > 0 {
			return n, nil
		}
		c.flush()
		select {
		case <-c.credited:
		case <-c.done:
		}
	}
}
