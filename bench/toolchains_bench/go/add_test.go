package sums

import (
	"testing"

	"github.com/google/uuid"
)

func TestAdd(t *testing.T) {
	if Add(2, 3) != 5 {
		t.Fatal("2 + 3")
	}
}

func TestDependency(t *testing.T) {
	if len(uuid.Nil.String()) != 36 {
		t.Fatal("uuid")
	}
}
