package main

import (
	"crypto/subtle"
	"encoding/binary"
	"sync"
)

const (
	protocol = 1
	version  = "1"

	maxOpenCalls = 64
	maxCallBytes = 256 << 10
	maxPing      = 64
)

// agent serves one sandbox.
type agent struct {
	port  port
	place place
	// Who commands are; negative leaves them the agent's own user.
	uid    int
	isInit bool
	bootID []byte

	shells  sessions
	workers workers
	jobs    jobs
	marks   marks
	proxy   proxyPort

	// Below: guarded by mu.
	mu         sync.Mutex
	calls      map[uint32]*call
	parts      map[uint32][]byte
	lastStream uint32
	tokenHash  []byte
	// The token of that hash, once a call has had it: hashing costs more than reading a file.
	token      []byte
	generation uint64
	results    resultCache
}

func newAgent(root, state string, uid int, isInit bool) *agent {
	a := &agent{
		place:  place{root: root, owner: uid},
		uid:    uid,
		isInit: isInit,
		bootID: bootID(),
		calls:  map[uint32]*call{},
		parts:  map[uint32][]byte{},
	}
	a.jobs = jobs{folder: state, ended: a.jobEnded}
	a.port.take = a.take
	return a
}

func (a *agent) hello() {
	m := helloMessage{
		protocol: protocol, version: version, bootID: a.bootID,
		capabilities: capabilities(a.isInit), memoryBytes: memoryBytes(),
	}
	a.port.send(appendFrame(nil, 0, typeHello, 0, encode(&m)), nil)
}

// take handles one frame; false says that no host of ours would send it.
func (a *agent) take(f frame) bool {
	if isOnStream(f.kind) != (f.stream != 0) {
		return false
	}
	switch f.kind {
	case typeReset:
		return a.reset(f)
	case typeSync:
		return a.sync(f.payload)
	case typePing:
		if len(f.payload) > maxPing {
			return false
		}
		a.port.send(appendFrame(nil, 0, typePong, 0, f.payload), nil)
		return true
	case typePong:
		return len(f.payload) <= maxPing
	case typeCall:
		return a.open(f)
	}
	return a.forward(f)
}

func isOnStream(kind byte) bool {
	switch kind {
	case typeCall, typeData, typeCredit, typeCancel, typeSignal:
		return true
	}
	return false
}

// forward hands a frame to its call, which may have ended a moment ago.
func (a *agent) forward(f frame) bool {
	a.mu.Lock()
	c := a.calls[f.stream]
	a.mu.Unlock()
	switch f.kind {
	case typeData:
		return c == nil || c.received(f)
	case typeCredit:
		if len(f.payload) != 4 {
			return false
		}
		if c != nil {
			c.addCredit(binary.LittleEndian.Uint32(f.payload))
		}
	case typeCancel:
		if len(f.payload) != 0 {
			return false
		}
		if c != nil {
			c.end(statusCancelled)
		}
	case typeSignal:
		if len(f.payload) != 4 {
			return false
		}
		if c != nil {
			c.deliverSignal(binary.LittleEndian.Uint32(f.payload))
		}
	default:
		return false
	}
	return true
}

// reset begins an epoch: open calls are cancelled, what they still write is dropped.
func (a *agent) reset(f frame) bool {
	if len(f.payload) != resetPayload || string(f.payload[:len(magic)]) != magic {
		return false
	}
	ack := resetAckMessage{bootID: a.bootID}
	a.port.mu.Lock()
	a.mu.Lock()
	for stream, c := range a.calls {
		ack.open = append(ack.open, openMessage{stream: stream, callID: c.id(), sentBytes: c.sent.Load()})
		c.isOver = true
		c.end(statusCancelled)
	}
	clear(a.calls)
	clear(a.parts)
	a.lastStream = 0
	ack.generation = a.generation
	a.mu.Unlock()
	a.port.mu.Unlock()
	ack.open = append(ack.open, a.jobs.open()...)
	payload := append([]byte(nil), f.payload[len(magic):]...)
	a.port.send(appendFrame(nil, 0, typeResetAck, 0, appendMessage(payload, &ack)), nil)
	return true
}

// sync gives a restored clone its own identity. The ack names what failed.
func (a *agent) sync(payload []byte) bool {
	var m syncMessage
	if decode(payload, &m) != nil {
		return false
	}
	ack := syncAckMessage{generation: m.generation}
	if a.isInit {
		ack.failed = becomeUnique(&m)
	}
	a.mu.Lock()
	a.tokenHash, a.token, a.generation = m.tokenSHA256, nil, m.generation
	a.mu.Unlock()
	a.port.send(appendFrame(nil, 0, typeSyncAck, 0, encode(&ack)), nil)
	return true
}

// admits compares in constant time; without a SYNC nothing is admitted.
func (a *agent) admits(token []byte) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.token != nil && subtle.ConstantTimeCompare(token, a.token) == 1 {
		return true
	}
	hash := tokenDigest(token)
	isRight := len(a.tokenHash) == len(hash) && subtle.ConstantTimeCompare(hash[:], a.tokenHash) == 1
	if isRight {
		a.token = token
	}
	return isRight
}

func (a *agent) event(m *eventMessage) {
	a.port.send(appendFrame(nil, 0, typeEvent, 0, encode(m)), nil)
}

func (a *agent) jobEnded(m *jobExitMessage) { a.event(&eventMessage{jobExit: m}) }
