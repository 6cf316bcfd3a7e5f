package main

import (
	"crypto/sha256"
	"math/rand/v2"
	"testing"
)

func TestTokensHaveTheDigestThatTheLibraryHas(t *testing.T) {
	source := rand.New(rand.NewPCG(1, 2))
	for size := range 300 {
		token := make([]byte, size)
		for i := range token {
			token[i] = byte(source.Uint32())
		}
		if tokenDigest(token) != sha256.Sum256(token) {
			t.Fatalf("another digest of %x", token)
		}
	}
}
