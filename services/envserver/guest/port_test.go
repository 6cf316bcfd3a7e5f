package main

import (
	"bytes"
	"encoding/binary"
	"io"
	"runtime"
	"testing"
)

// written is what each write to the host was.
type written struct{ pieces [][]byte }

func (w *written) Write(data []byte) (int, error) {
	w.pieces = append(w.pieces, bytes.Clone(data))
	return len(data), nil
}

func called(number uint32, m callMessage) []byte {
	m.id = binary.LittleEndian.AppendUint32(make([]byte, idBytes-4), number)
	m.token = []byte("token")
	return appendFrame(nil, number, typeCall, 0, encode(&m))
}

func TestReadsThatComeTogetherAreAnsweredInOneWrite(t *testing.T) {
	runtime.GOMAXPROCS(1)
	a, host := withFile(t), &written{}
	a.port.connect(host)
	var calls []byte
	for number := uint32(1); number <= 7; number++ {
		calls = append(calls, called(number, callMessage{read: &readMessage{path: "f"}})...)
	}
	if err := a.port.read(bytes.NewReader(calls), &parser{}); err != io.EOF {
		t.Fatal(err)
	}
	if len(host.pieces) != 1 || len(host.pieces[0]) < 7*4000 {
		t.Errorf("%d writes", len(host.pieces))
	}
}

func TestWhatMayTakeLongKeepsNoAnswerBack(t *testing.T) {
	runtime.GOMAXPROCS(1)
	a, host := withFile(t), &written{}
	a.port.connect(host)
	calls := called(1, callMessage{read: &readMessage{path: "f"}})
	calls = append(calls, called(2, callMessage{walk: &walkMessage{}})...)
	if err := a.port.read(bytes.NewReader(calls), &parser{}); err != io.EOF {
		t.Fatal(err)
	}
	if len(host.pieces) != 2 || len(host.pieces[0]) < 4000 {
		t.Errorf("%d writes", len(host.pieces))
	}
}

func TestFramesKeepTheirOrderWhateverTheirSize(t *testing.T) {
	p, host := port{}, &written{}
	p.connect(host)
	p.isTaking.Store(true)
	var sent []byte
	for _, size := range []int{1, maxHeld - 1, 2, maxHeld + 1, 3, 4, maxHeld, 5} {
		frames := bytes.Repeat([]byte{byte(len(sent))}, size)
		sent = append(sent, frames...)
		p.send(frames, nil)
	}
	p.flush()
	if !bytes.Equal(bytes.Join(host.pieces, nil), sent) {
		t.Error("another order")
	}
	if len(host.pieces) > 6 {
		t.Errorf("%d writes", len(host.pieces))
	}
}

func TestAHostGetsNothingThatWasHeldForTheOneBefore(t *testing.T) {
	p, host := port{}, &written{}
	p.connect(io.Discard)
	p.isTaking.Store(true)
	p.send([]byte("of an earlier host"), nil)
	p.connect(host)
	p.flush()
	if len(host.pieces) != 0 {
		t.Errorf("%q", host.pieces)
	}
}
