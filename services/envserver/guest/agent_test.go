package main

import (
	"crypto/sha256"
	"encoding/binary"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

// answered is an agent in a test's folder whose answers are not read.
func answered(t testing.TB) *agent {
	a := newAgent(t.TempDir(), t.TempDir(), -1, false)
	a.port.connect(io.Discard)
	hash := sha256.Sum256([]byte("token"))
	a.tokenHash = hash[:]
	return a
}

func ask(t testing.TB, a *agent, number uint32) {
	id := make([]byte, idBytes)
	binary.LittleEndian.PutUint32(id, number)
	m := callMessage{id: id, token: []byte("token"), read: &readMessage{path: "f"}, deadlineMs: 60_000}
	if !a.take(frame{number, typeCall, 0, encode(&m)}) {
		t.Fatal("not taken")
	}
}

func withFile(t testing.TB) *agent {
	a := answered(t)
	if err := os.WriteFile(filepath.Join(a.place.root, "f"), make([]byte, 4000), 0o600); err != nil {
		t.Fatal(err)
	}
	return a
}

// What is not used again is a page that a clone no longer shares. A call needs 2.3 KB; a copy of
// what it read would take 4 more.
func TestACallLeavesLittleMemoryBehind(t *testing.T) {
	runtime.GOMAXPROCS(1)
	a := withFile(t)
	const numCalls = 2000
	var before, after runtime.MemStats
	for number := uint32(1); number <= 2*numCalls; number++ {
		if number == numCalls {
			runtime.ReadMemStats(&before)
		}
		ask(t, a, number)
	}
	runtime.ReadMemStats(&after)
	if each := (after.TotalAlloc - before.TotalAlloc) / numCalls; each > 4000 {
		t.Errorf("a call allocates %d bytes", each)
	}
}

func BenchmarkRead(b *testing.B) {
	a := withFile(b)
	b.ReportAllocs()
	for number := uint32(1); b.Loop(); number++ {
		ask(b, a, number)
	}
}

func TestOnlyTheTokenOfThePresentGenerationIsAdmitted(t *testing.T) {
	a := answered(t)
	first, second := []byte("token"), []byte("another token")
	for range 2 {
		if !a.admits(first) || a.admits(second) || a.admits(nil) || a.admits(first[:4]) {
			t.Fatal("not the token of the first generation alone")
		}
	}
	hash := sha256.Sum256(second)
	if !a.sync(encode(&syncMessage{tokenSHA256: hash[:], generation: 2})) {
		t.Fatal("no SYNC")
	}
	if a.admits(first) || !a.admits(second) || a.admits(nil) {
		t.Error("not the token of the second generation alone")
	}
	if !a.sync(encode(&syncMessage{})) || a.admits(second) || a.admits(nil) {
		t.Error("an agent without a token admits a call")
	}
}
