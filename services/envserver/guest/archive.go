package main

import (
	"bytes"
	"strconv"
	"strings"
	"syscall"
)

const (
	blockBytes       = 512
	maxArchiveHeader = 64 << 10
	maxEntries       = 200_000
)

// archiveReader reads the blocks of a tar archive from the host's data.
type archiveReader struct {
	call *call
	held []byte
}

// take is exactly this many bytes; fewer are an error.
func (r *archiveReader) take(size int) ([]byte, error) {
	for len(r.held) < size {
		piece, err := r.call.receive(nil)
		if err != nil {
			return nil, err
		}
		if piece == nil {
			return nil, refusal{statusInvalid, "the archive ends within an entry"}
		}
		r.held = append(r.held, piece...)
	}
	taken := r.held[:size]
	r.held = r.held[size:]
	return taken, nil
}

// some is at least one byte and at most this many.
func (r *archiveReader) some(size int) ([]byte, error) {
	if len(r.held) == 0 {
		piece, err := r.call.receive(nil)
		if err != nil {
			return nil, err
		}
		if piece == nil {
			return nil, refusal{statusInvalid, "the archive ends within an entry"}
		}
		r.held = piece
	}
	return r.take(min(size, len(r.held)))
}

// archiveEntry is one file or folder.
type archiveEntry struct {
	path       string
	size       int64
	isFolder   bool
	executable bool
}

// next is the next entry, or nil at the end. Anything but plain files and folders is refused by name.
func (r *archiveReader) next() (*archiveEntry, error) {
	longName, longSize := "", int64(-1)
	for {
		block, err := r.take(blockBytes)
		if err != nil {
			return nil, err
		}
		if len(bytes.Trim(block, "\x00")) == 0 {
			return nil, nil
		}
		entry, kind, err := parseHeader(block)
		if err != nil {
			return nil, err
		}
		if kind == 'x' {
			if longName, longSize, err = r.extended(entry.size); err != nil {
				return nil, err
			}
			continue
		}
		if longName != "" {
			entry.path = longName
		}
		if longSize >= 0 {
			entry.size = longSize
		}
		return entry, entry.check(kind)
	}
}

func (e *archiveEntry) check(kind byte) error {
	shown := strconv.Quote(e.path[:min(len(e.path), 200)])
	if what, isKnown := refusedKinds[kind]; isKnown {
		return refusal{statusInvalid, "the archive's entry " + shown + " is a " + what}
	}
	if e.isFolder = kind == '5'; e.isFolder {
		e.path, e.size = strings.TrimSuffix(e.path, "/"), 0
	} else if kind != '0' && kind != 0 {
		return refusal{statusInvalid, "the archive's entry " + shown + " is neither file nor folder"}
	}
	if e.path == "" || !isPossible(e.path) {
		return refusal{statusInvalid, "the archive's entry " + shown + " is not a path inside the folder"}
	}
	return nil
}

var refusedKinds = map[byte]string{
	'1': "hard link", '2': "link", '3': "device", '4': "device", '6': "pipe",
}

func parseHeader(block []byte) (*archiveEntry, byte, error) {
	size, isSize := octal(block[124:136])
	mode, isMode := octal(block[100:108])
	sum, isSum := octal(block[148:156])
	actual := int64(8 * ' ')
	for i, letter := range block {
		if i < 148 || i >= 156 {
			actual += int64(letter)
		}
	}
	if !isSize || !isMode || !isSum || sum != actual || size < 0 {
		return nil, 0, refusal{statusInvalid, "the archive has a damaged header"}
	}
	path := text(block[:100])
	if prefix := text(block[345:500]); prefix != "" && bytes.HasPrefix(block[257:], []byte("ustar\x00")) {
		path = prefix + "/" + path
	}
	return &archiveEntry{path: path, size: size, executable: mode&0o100 != 0}, block[156], nil
}

func text(field []byte) string {
	before, _, _ := bytes.Cut(field, []byte{0})
	return string(before)
}

func octal(field []byte) (int64, bool) {
	number := strings.Trim(text(field), " ")
	if number == "" {
		return 0, true
	}
	value, err := strconv.ParseInt(number, 8, 63)
	return value, err == nil
}

// extended reads a header of POSIX pax: a long path, and a size.
func (r *archiveReader) extended(size int64) (string, int64, error) {
	damaged := refusal{statusInvalid, "the archive has a damaged extended header"}
	if size > maxArchiveHeader {
		return "", 0, damaged
	}
	block, err := r.take(int(padded(size)))
	if err != nil {
		return "", 0, err
	}
	path, long, rest := "", int64(-1), string(block[:size])
	for rest != "" {
		number, _, isFound := strings.Cut(rest, " ")
		length, err := strconv.Atoi(number)
		if !isFound || err != nil || length <= len(number)+1 || length > len(rest) {
			return "", 0, damaged
		}
		key, value, _ := strings.Cut(strings.TrimSuffix(rest[len(number)+1:length], "\n"), "=")
		rest = rest[length:]
		switch key {
		case "path":
			path = value
		case "size":
			if long, err = strconv.ParseInt(value, 10, 63); err != nil {
				return "", 0, damaged
			}
		}
	}
	return path, long, nil
}

func padded(size int64) int64 { return (size + blockBytes - 1) / blockBytes * blockBytes }

// apply deletes files, and unpacks the archive that the host sends over what is there. It stops at the
// first error: the sandbox is of no use then.
func (c *call) apply(at place, m *applyMessage) error {
	for _, path := range m.deleted {
		if path == "" || !isPossible(path) {
			return faultAt(faultBadName, path)
		}
		at.remove(path)
	}
	if !m.hasArchive {
		return nil
	}
	reader := &archiveReader{call: c}
	for range maxEntries {
		entry, err := reader.next()
		if entry == nil || err != nil {
			return err
		}
		if err := c.unpack(at, entry, reader); err != nil {
			return faultOr(err, entry.path)
		}
	}
	return refusal{statusInvalid, "the archive has too many entries"}
}

// faultOr names the path that a fault of the kernel or of ours is about.
func faultOr(err error, path string) error {
	if errno, ok := err.(syscall.Errno); ok && ofErrno[errno] != 0 {
		return faultAt(ofErrno[errno], path)
	}
	if named, ok := err.(fault); ok && named.path == nil {
		return faultAt(named.kind, path)
	}
	return err
}

// remove deletes a file or link, and the folders above it that are empty then.
func (p place) remove(path string) {
	folder, name, err := p.parent(path, false)
	if err != nil {
		return // it is not there
	}
	err = syscall.Unlinkat(folder, name)
	closeFd(folder)
	for err == nil {
		at := strings.LastIndexByte(path, '/')
		if at < 0 {
			return
		}
		path = path[:at]
		if folder, name, err = p.parent(path, false); err != nil {
			return
		}
		err = removeFolderAt(folder, name)
		closeFd(folder)
	}
}

// replaceParent opens the folder of a path, and makes folders of what is in the way.
func (p place) replaceParent(path string) (int, string, error) {
	folder, err := p.folder("", false)
	for err == nil {
		name, rest, isFolder := strings.Cut(path, "/")
		if !isFolder {
			return folder, name, nil
		}
		inner, failed := openFolderAt(folder, name)
		if failed == syscall.ENOTDIR || failed == syscall.ELOOP {
			_ = syscall.Unlinkat(folder, name)
		}
		if failed != nil {
			inner, failed = p.enter(folder, name, path, true)
		}
		closeFd(folder)
		folder, path, err = inner, rest, failed
	}
	return -1, "", err
}

// unpack writes one file, in place of whatever has its name.
func (c *call) unpack(at place, entry *archiveEntry, reader *archiveReader) error {
	if entry.isFolder {
		folder, _, err := at.replaceParent(entry.path + "/x")
		if err == nil {
			closeFd(folder)
		}
		return err
	}
	folder, name, err := at.replaceParent(entry.path)
	if err != nil {
		return err
	}
	defer closeFd(folder)
	mode := uint32(defaultMode)
	if entry.executable {
		mode = 0o755
	}
	if err := c.removeTree(folder, name, 0); err != nil && err != syscall.ENOENT {
		return err
	}
	file, err := openAt(folder, name, openNew, mode)
	if err != nil {
		return err
	}
	defer closeFd(file)
	if err := at.own(file, mode); err != nil {
		return err
	}
	for left := entry.size; left > 0; {
		piece, err := reader.some(int(min(left, 256<<10)))
		if err != nil {
			return err
		}
		left -= int64(len(piece))
		if err := writeAll(file, piece); err != nil {
			return err
		}
	}
	_, err = reader.take(int(padded(entry.size) - entry.size))
	return err
}

// own gives a new file its mode and owner.
func (p place) own(file int, mode uint32) error {
	if err := syscall.Fchmod(file, mode); err != nil || p.owner < 0 {
		return err
	}
	return syscall.Fchown(file, p.owner, p.owner)
}

// removeTree deletes what has a name in an open folder, with all below it.
func (c *call) removeTree(folder int, name string, depth int) error {
	err := syscall.Unlinkat(folder, name)
	if err != syscall.EISDIR && err != syscall.EPERM || depth > maxDepth {
		return err
	}
	inner, err := openFolderAt(folder, name)
	if err != nil {
		return err
	}
	defer closeFd(inner)
	for {
		names, err := namesOf(inner, 1)
		if err != nil {
			return err
		}
		if len(names) == 0 {
			return removeFolderAt(folder, name)
		}
		for _, each := range names {
			if err := c.removeTree(inner, each, depth+1); err != nil {
				return err
			}
		}
		if _, err := syscall.Seek(inner, 0, 0); err != nil {
			return err
		}
		if err := c.stopError(); err != nil {
			return err
		}
	}
}
