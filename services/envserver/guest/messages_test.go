package main

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"testing"
)

// made are all messages by their names in guest.proto.
var made = map[string]func() message{
	"GuestHello":    func() message { return new(helloMessage) },
	"GuestResetAck": func() message { return new(resetAckMessage) },
	"GuestSync":     func() message { return new(syncMessage) },
	"GuestSyncAck":  func() message { return new(syncAckMessage) },
	"GuestCall":     func() message { return new(callMessage) },
	"GuestResult":   func() message { return new(resultMessage) },
	"GuestEntries":  func() message { return new(entriesMessage) },
	"GuestPaths":    func() message { return new(pathsMessage) },
	"GuestMatches":  func() message { return new(matchesMessage) },
	"GuestDigests":  func() message { return new(digestsMessage) },
	"GuestEvent":    func() message { return new(eventMessage) },
	"WorkspaceDiff": func() message { return new(workspaceDiffMessage) },
}

// The host's tests write messages of Google's encoder into a file, one `NAME HEX` a line, and read
// what this codec makes of each.
func TestMessagesOfAnotherEncoderAreReadAndWrittenBack(t *testing.T) {
	path := os.Getenv("GUEST_CORPUS")
	if path == "" {
		t.Skip("GUEST_CORPUS names no file: the host's tests set it")
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(path + ".out")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	writer := bufio.NewWriter(out)
	defer writer.Flush()
	for line := range strings.Lines(string(text)) {
		name, digits, _ := strings.Cut(strings.TrimSpace(line), " ")
		data, err := hex.DecodeString(digits)
		if err != nil || made[name] == nil {
			t.Fatalf("%s: %v", name, err)
		}
		m := made[name]()
		if err := decode(data, m); err != nil {
			fmt.Fprintln(writer, "refused")
		} else {
			fmt.Fprintln(writer, hex.EncodeToString(encode(m)))
		}
	}
}

func TestWhatIsNoMessageIsRefused(t *testing.T) {
	for _, digits := range []string{
		"0a", "0aff", "0a05aabb", "ffffffffffffffffffff01", "00", "0b", "08", "0d0102", "0901", "07",
		"0affffffffffffffffff01", "120131ff",
	} {
		data, _ := hex.DecodeString(digits)
		if decode(data, new(helloMessage)) == nil {
			t.Errorf("%s was taken for a message", digits)
		}
	}
	if decode([]byte("\x12\x01\xff"), new(helloMessage)) == nil {
		t.Error("a text that is no UTF-8 was taken")
	}
}

func TestFieldsOfALaterVersionAreSkipped(t *testing.T) {
	var m helloMessage
	data, _ := hex.DecodeString("0801" + "f80101" + "f90101020304050607" + "08" + "fa010161" + "fd0101020304")
	if err := decode(data, &m); err != nil || m.protocol != 1 {
		t.Fatal(err, m)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte("\x0a\x10aaaaaaaaaaaaaaaa"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for name := range made {
			m := made[name]()
			if decode(data, m) != nil {
				continue
			}
			again := made[name]()
			if err := decode(encode(m), again); err != nil {
				t.Fatal(name, err)
			}
		}
	})
}
