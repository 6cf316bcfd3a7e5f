package main

import (
	"bytes"
	"encoding/binary"
)

// A frame is `len u32 | stream u32 | type u8 | flags u8 | payload`, little-endian; len counts what
// follows itself.
const (
	headerBytes  = 10
	maxPayload   = 64 << 10
	minLength    = headerBytes - 4
	maxLength    = minLength + maxPayload
	magic        = "ETUDE-RESET-v1\r\n"
	nonceBytes   = 16
	resetPayload = len(magic) + nonceBytes + 8
)

const (
	typeHello    = 0x01
	typeReset    = 0x02
	typeResetAck = 0x03
	typeSync     = 0x04
	typeSyncAck  = 0x05
	typePing     = 0x06
	typePong     = 0x07
	typeCall     = 0x10
	typeResult   = 0x11
	typeData     = 0x12
	typeCredit   = 0x13
	typeCancel   = 0x14
	typeSignal   = 0x15
	typeEvent    = 0x20
)

const (
	// Of DATA.
	flagEnd      = 0x01
	channelShift = 1
	channelMask  = 0x03
	// Of CALL: the call goes on in the stream's next CALL.
	flagMore = 0x01
	// Of RESULT: an earlier call's, from the id cache; and its DATA was too long to be kept.
	flagReplayed = 0x01
	flagNotKept  = 0x02
)

type frame struct {
	stream      uint32
	kind, flags byte
	payload     []byte
}

// appendFrame writes one frame; its payload must fit.
func appendFrame(out []byte, stream uint32, kind, flags byte, payload []byte) []byte {
	out = binary.LittleEndian.AppendUint32(out, uint32(minLength+len(payload)))
	out = binary.LittleEndian.AppendUint32(out, stream)
	out = append(out, kind, flags)
	return append(out, payload...)
}

// parser cuts a byte stream into frames. After bytes that are no frame it looks for nothing but the
// magic of a RESET, which cannot be missed: whatever was cut off, the host sends it again.
type parser struct {
	buffer     [headerBytes + maxPayload]byte
	start, end int
	// Where the last frame began.
	begin      int
	isScanning bool
}

// room is where the next bytes belong.
func (p *parser) room() []byte {
	if p.start > 0 {
		copy(p.buffer[:], p.buffer[p.start:p.end])
		p.end -= p.start
		p.start = 0
	}
	return p.buffer[p.end:]
}

func (p *parser) advance(n int) { p.end += n }

func (p *parser) drop() { p.start, p.end, p.isScanning = 0, 0, false }

// scan gives up the frame borders: what the last frame held may be the RESET of a host that began
// in the middle of another.
func (p *parser) scan() { p.start, p.isScanning = p.begin, true }

// next is the next complete frame; its payload is good until room is asked for again.
func (p *parser) next() (frame, bool) {
	for {
		if p.isScanning {
			return p.findReset()
		}
		held := p.buffer[p.start:p.end]
		if len(held) < 4 {
			return frame{}, false
		}
		length := binary.LittleEndian.Uint32(held)
		if length < minLength || length > maxLength {
			p.isScanning = true
			continue
		}
		total := 4 + int(length)
		if len(held) < total {
			return frame{}, false
		}
		p.begin = p.start
		p.start += total
		return frame{binary.LittleEndian.Uint32(held[4:]), held[8], held[9], held[headerBytes:total]}, true
	}
}

// found is the RESET behind the next magic; all before it is discarded.
func (p *parser) findReset() (frame, bool) {
	held := p.buffer[p.start:p.end]
	at := bytes.Index(held, []byte(magic))
	if at < 0 {
		keep := min(len(held), len(magic)-1)
		p.start = p.end - keep
		return frame{}, false
	}
	p.start += at
	if len(held)-at < resetPayload {
		return frame{}, false
	}
	p.begin = p.start + resetPayload
	p.start = p.begin
	p.isScanning = false
	return frame{0, typeReset, 0, held[at : at+resetPayload]}, true
}
