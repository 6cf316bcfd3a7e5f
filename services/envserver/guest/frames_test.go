package main

import (
	"bytes"
	"testing"
)

// fed are the frames of a parser that gets the bytes in pieces of one size.
func fed(p *parser, data []byte, size int) []frame {
	var all []frame
	for len(data) > 0 {
		n := copy(p.room(), data[:min(size, len(data))])
		p.advance(n)
		data = data[n:]
		for {
			next, ok := p.next()
			if !ok {
				break
			}
			next.payload = bytes.Clone(next.payload)
			all = append(all, next)
		}
	}
	return all
}

func TestFramesArriveHoweverTheBytesAreCut(t *testing.T) {
	var data []byte
	for i := range 50 {
		data = appendFrame(data, uint32(i+1), typeData, byte(i), bytes.Repeat([]byte{byte(i)}, i*37))
	}
	data = appendFrame(data, 9, typeData, 0, make([]byte, maxPayload))
	for _, size := range []int{1, 3, 10, 1000, len(data)} {
		all := fed(&parser{}, data, size)
		if len(all) != 51 || len(all[50].payload) != maxPayload || all[49].flags != 49 {
			t.Fatalf("pieces of %d bytes: %d frames", size, len(all))
		}
	}
}

func TestAResetIsFoundBehindAnything(t *testing.T) {
	reset := append([]byte(magic), bytes.Repeat([]byte{7}, nonceBytes+8)...)
	for _, before := range [][]byte{nil, make([]byte, 70_000), []byte("ETUDE-RESET-"), {0xff}} {
		for _, size := range []int{1, 39, 100_000} {
			p := &parser{isScanning: true}
			data := appendFrame(append(bytes.Clone(before), reset...), 0, typePing, 0, nil)
			all := fed(p, data, size)
			if len(all) != 2 || all[0].kind != typeReset || all[1].kind != typePing {
				t.Fatalf("%d bytes before, pieces of %d: %v", len(before), size, all)
			}
		}
	}
}

func TestPaddingCompletesAnyHalfFrameAndLeadsToTheNextReset(t *testing.T) {
	whole := appendFrame(nil, 1, typeData, 0, make([]byte, maxPayload))
	reset := appendFrame(nil, 0, typeReset, 0, append([]byte(magic), make([]byte, nonceBytes+8)...))
	for _, length := range []int{1, 2, 3, 4, 9, 10, 11, 5000, len(whole) - 1} {
		data := append(bytes.Clone(whole[:length]), make([]byte, maxLength)...)
		all := fed(&parser{}, append(data, reset...), 4096)
		if len(all) == 0 || all[len(all)-1].kind != typeReset {
			t.Fatalf("half a frame of %d bytes: no RESET found in %d frames", length, len(all))
		}
	}
}

func FuzzParser(f *testing.F) {
	f.Add([]byte("\x06\x00\x00\x00\x01\x00\x00\x00\x12\x00" + magic))
	f.Fuzz(func(t *testing.T, data []byte) {
		p := &parser{}
		for i, each := range fed(p, data, 17) {
			if len(each.payload) > maxPayload {
				t.Fatal(i, len(each.payload))
			}
		}
	})
}
