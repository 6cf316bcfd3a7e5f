package main

import (
	"encoding/binary"
	"math"
	"math/bits"
)

// tokenDigest is the SHA-256 of something short. The library's is 1,500 instructions long where
// this is 200: it is faster by the second block, and each clone needs one block of it for the first
// time, for which its host translates every instruction.
func tokenDigest(token []byte) [32]byte {
	padded := append(append(make([]byte, 0, 128), token...), 0x80)
	for len(padded)%64 != 56 {
		padded = append(padded, 0)
	}
	padded = binary.BigEndian.AppendUint64(padded, uint64(len(token))*8)
	state := tokenStart
	for ; len(padded) > 0; padded = padded[64:] {
		mixBlock(&state, padded)
	}
	var digest [32]byte
	for i, word := range state {
		binary.BigEndian.PutUint32(digest[4*i:], word)
	}
	return digest
}

func mixBlock(state *[8]uint32, block []byte) {
	var w [64]uint32
	for i := range w {
		if i < 16 {
			w[i] = binary.BigEndian.Uint32(block[4*i:])
			continue
		}
		a, b := w[i-15], w[i-2]
		a = bits.RotateLeft32(a, -7) ^ bits.RotateLeft32(a, -18) ^ a>>3
		b = bits.RotateLeft32(b, -17) ^ bits.RotateLeft32(b, -19) ^ b>>10
		w[i] = w[i-16] + a + w[i-7] + b
	}
	s := *state
	for i, word := range w {
		e, a := s[4], s[0]
		sum := bits.RotateLeft32(e, -6) ^ bits.RotateLeft32(e, -11) ^ bits.RotateLeft32(e, -25)
		first := s[7] + sum + (e&s[5] ^ ^e&s[6]) + tokenRounds[i] + word
		sum = bits.RotateLeft32(a, -2) ^ bits.RotateLeft32(a, -13) ^ bits.RotateLeft32(a, -22)
		second := sum + (a&s[1] ^ a&s[2] ^ s[1]&s[2])
		s = [8]uint32{first + second, a, s[1], s[2], s[3] + first, e, s[5], s[6]}
	}
	for i := range state {
		state[i] += s[i]
	}
}

// The first bits of the fractions of roots of the first primes, as FIPS 180-4 defines them.
var (
	tokenStart  [8]uint32
	tokenRounds [64]uint32
)

func init() {
	for i, prime := 0, 2; i < len(tokenRounds); prime++ {
		if !isPrime(prime) {
			continue
		}
		if i < len(tokenStart) {
			tokenStart[i] = fraction(math.Sqrt(float64(prime)))
		}
		tokenRounds[i] = fraction(math.Cbrt(float64(prime)))
		i++
	}
}

func isPrime(number int) bool {
	for divisor := 2; divisor*divisor <= number; divisor++ {
		if number%divisor == 0 {
			return false
		}
	}
	return true
}

func fraction(root float64) uint32 { return uint32((root - math.Floor(root)) * (1 << 32)) }
