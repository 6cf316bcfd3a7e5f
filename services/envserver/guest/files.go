package main

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"io"
	"syscall"
)

const (
	defaultMode = 0o644
	entryBatch  = 256
)

func infoOf(found *syscall.Stat_t) *infoMessage {
	info := &infoMessage{
		mode:    found.Mode & 0o7777,
		mtimeNs: found.Mtim.Nano(),
		kind:    kindOf(found),
	}
	if info.kind == kindFile {
		info.size = uint64(found.Size)
	}
	return info
}

func (p place) stat(path string) (*resultMessage, error) {
	folder, name, err := p.parent(path, false)
	if err != nil {
		return nil, err
	}
	defer closeFd(folder)
	found, err := statAt(folder, name)
	if err != nil {
		return nil, err
	}
	return &resultMessage{info: infoOf(&found)}, nil
}

func (p place) delete(path string) error {
	folder, name, err := p.parent(path, false)
	if err != nil {
		return err
	}
	defer closeFd(folder)
	if name == "" {
		return fault{kind: faultIsFolder}
	}
	return syscall.Unlinkat(folder, name)
}

func (c *call) list(at place, path string) error {
	if !isPossible(path) {
		return fault{kind: faultBadName}
	}
	folder, err := at.folder(path, false)
	if err != nil {
		return err
	}
	defer closeFd(folder)
	entries, err := listFolder(folder, maxFiles, fault{kind: faultTooMany})
	if err != nil {
		return err
	}
	batch := entriesMessage{make([]entryMessage, 0, min(len(entries), entryBatch))}
	for i := range entries {
		each := &entries[i]
		batch.entries = append(batch.entries, entryMessage{each.name, kindOf(&each.stat), each.size()})
		if len(batch.entries) == entryBatch || i == len(entries)-1 {
			if err := c.data(0, encode(&batch)); err != nil {
				return err
			}
			batch.entries = batch.entries[:0]
		}
	}
	c.endData(0)
	return nil
}

// read sends a regular file, at most one byte past the limit while it grows.
func (c *call) read(at place, m *readMessage) (*resultMessage, error) {
	folder, name, err := at.parent(m.path, false)
	if err != nil {
		return nil, err
	}
	defer closeFd(folder)
	file, found, err := openRegular(folder, name)
	if err != nil {
		return nil, err
	}
	defer closeFd(file)
	if found.Size > maxFileBytes {
		return nil, fault{kind: faultTooLarge}
	}
	var digest hash.Hash
	if m.digest {
		digest = sha256.New()
	}
	if err := c.sendFile(file, &found, m, digest); err != nil {
		return nil, err
	}
	c.endData(0)
	info := infoOf(&found)
	if digest != nil {
		info.sha256 = digest.Sum(nil)
	}
	return &resultMessage{info: info}, nil
}

func (c *call) sendFile(file int, found *syscall.Stat_t, m *readMessage, digest hash.Hash) error {
	buffer := chunks.get()
	defer chunks.put(buffer)
	left := uint64(maxFileBytes + 1)
	if m.limit > 0 {
		left = min(left, m.limit)
	}
	offset := int64(min(m.offset, maxFileBytes))
	for left > 0 {
		into := (*buffer)[:min(uint64(len(*buffer)), left)]
		n, err := readAt(file, into, offset)
		if err != nil || n == 0 {
			return err
		}
		offset += int64(n)
		left -= uint64(n)
		if offset > maxFileBytes {
			return fault{kind: faultTooLarge}
		}
		piece := (*buffer)[:n]
		if digest != nil {
			digest.Write(piece)
		}
		if err := c.data(0, piece); err != nil {
			return err
		}
		if n < len(into) && found.Size > 0 && offset >= found.Size {
			return nil // files of the kernel's own have no size, and end when a read has nothing
		}
	}
	return nil
}

// write replaces or creates a file in one step, keeping the mode of the one that was there. The
// data goes to a file beside it, which takes the name only if size and digest are right.
func (c *call) write(at place, m *writeMessage) (*resultMessage, error) {
	if m.size > maxFileBytes {
		return nil, fault{kind: faultTooLarge}
	}
	folder, name, err := at.parent(m.path, true)
	if err != nil {
		return nil, err
	}
	defer closeFd(folder)
	mode, err := modeFor(folder, name, m)
	if err != nil {
		return nil, err
	}
	temporary := ".etude-" + randomName()
	file, err := openAt(folder, temporary, openNew, mode)
	if err != nil {
		return nil, err
	}
	info, err := c.fill(at, file, m, mode)
	closeFd(file)
	if err == nil {
		err = syscall.Renameat(folder, temporary, folder, name)
	}
	if err != nil {
		_ = syscall.Unlinkat(folder, temporary)
		return nil, err
	}
	return &resultMessage{info: info}, nil
}

// modeFor is the new file's mode, once the present one is what the caller expects.
func modeFor(folder int, name string, m *writeMessage) (uint32, error) {
	mode := uint32(defaultMode)
	found, err := statAt(folder, name)
	if err == nil {
		err = checkRegular(&found)
		mode = found.Mode & 0o777
	}
	if err != nil && err != syscall.ENOENT {
		return 0, err
	}
	if m.mode != 0 {
		mode = m.mode & 0o777
	}
	if len(m.expectedSHA256) == 0 {
		return mode, nil
	}
	present, failed := digestOf(folder, name)
	if failed != nil && failed != syscall.ENOENT {
		return 0, failed
	}
	if failed != nil || !bytes.Equal(present, m.expectedSHA256) {
		return 0, refusal{statusConflict, "the file is not the expected one"}
	}
	return mode, nil
}

func (c *call) fill(at place, file int, m *writeMessage, mode uint32) (*infoMessage, error) {
	digest := sha256.New()
	var size uint64
	for {
		piece, err := c.receive(nil)
		if err != nil {
			return nil, err
		}
		if piece == nil {
			break
		}
		if size += uint64(len(piece)); size > m.size {
			break
		}
		digest.Write(piece)
		if err := writeAll(file, piece); err != nil {
			return nil, err
		}
	}
	sum := digest.Sum(nil)
	if size != m.size || !bytes.Equal(sum, m.sha256) {
		return nil, refusal{statusInvalid, "the data has another size or digest than announced"}
	}
	if err := syscall.Fchmod(file, mode); err != nil {
		return nil, err
	}
	if at.owner >= 0 {
		if err := syscall.Fchown(file, at.owner, at.owner); err != nil {
			return nil, err
		}
	}
	var found syscall.Stat_t
	if err := statFd(file, &found); err != nil {
		return nil, err
	}
	info := infoOf(&found)
	info.sha256 = sum
	return info, nil
}

// digestOf is the SHA-256 of one regular file.
func digestOf(folder int, name string) ([]byte, error) {
	file, _, err := openRegular(folder, name)
	if err != nil {
		return nil, err
	}
	defer closeFd(file)
	buffer := chunks.get()
	defer chunks.put(buffer)
	digest := sha256.New()
	for {
		n, err := readAt(file, *buffer, -1)
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return digest.Sum(nil), nil
		}
		digest.Write((*buffer)[:n])
	}
}

func randomName() string {
	var name [16]byte
	_, _ = io.ReadFull(rand.Reader, name[:])
	return hex.EncodeToString(name[:])
}
