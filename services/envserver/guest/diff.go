package main

import (
	"bytes"
	"crypto/sha256"
	"slices"
	"strings"
	"sync"
	"syscall"
	"unicode/utf8"
)

const maxMarks = 16

// marked is a file as it was when the workspace was marked.
type marked struct {
	digest     [sha256.Size]byte
	executable bool
}

// marks are named states of the workspace.
type marks struct {
	mu    sync.Mutex
	named map[string]map[string]marked
}

// hashes sends the digest of every regular file below a path, in the order of the walk.
func (c *call) hashes(at place, path string) error {
	walk := at.walk(true, func(file found) error {
		digest, err := at.digest(file.path)
		if isSkipped(err) {
			return nil
		}
		if err != nil {
			return err
		}
		return c.data(0, encode(&digestsMessage{[]digestMessage{{file.path, digest}}}))
	})
	if err := walk.below(path); err != nil {
		return err
	}
	c.endData(0)
	return nil
}

func (p place) digest(path string) ([]byte, error) {
	folder, name, err := p.parent(path, false)
	if err != nil {
		return nil, err
	}
	defer closeFd(folder)
	return digestOf(folder, name)
}

func (c *call) mark(at place, name string) error {
	state := map[string]marked{}
	walk := at.walk(true, func(file found) error {
		digest, err := at.digest(file.path)
		if isSkipped(err) {
			return c.stopError()
		}
		if err == nil {
			state[file.path] = marked{[sha256.Size]byte(digest), isExecutable(&file.stat)}
			err = c.stopError()
		}
		return err
	})
	if err := walk.below(""); err != nil {
		return err
	}
	m := &c.agent.marks
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.named == nil {
		m.named = map[string]map[string]marked{}
	}
	if _, ok := m.named[name]; !ok && len(m.named) >= maxMarks || name == "" {
		return refusal{statusInvalid, "no name for a mark, or too many of them"}
	}
	m.named[name] = state
	return nil
}

func isExecutable(stat *syscall.Stat_t) bool { return stat.Mode&syscall.S_IXUSR != 0 }

// differ reads a workspace, within limits, and sends what is not as it was marked.
type differ struct {
	call    *call
	place   place
	before  map[string]marked
	seen    map[string]bool
	limits  *diffMessage
	entries uint64
	bytes   uint64
	isPlain bool
	buffer  []byte
}

func (c *call) diff(at place, m *diffMessage) (*resultMessage, error) {
	c.agent.marks.mu.Lock()
	before, ok := c.agent.marks.named[m.mark]
	c.agent.marks.mu.Unlock()
	if !ok && m.mark != "" {
		return nil, refusal{statusNotFound, "no such mark"}
	}
	d := &differ{call: c, place: at, before: before, seen: map[string]bool{}, limits: m, isPlain: true}
	root, err := at.folder("", false)
	if err != nil {
		return nil, err
	}
	defer closeFd(root)
	if err := d.folder(root, ""); err != nil {
		return nil, err
	}
	var rest workspaceDiffMessage
	for path := range before {
		if !d.seen[path] {
			rest.deleted = append(rest.deleted, path)
		}
	}
	slices.Sort(rest.deleted)
	if err := c.data(0, encode(&rest)); err != nil {
		return nil, err
	}
	c.endData(0)
	return &resultMessage{isPlain: d.isPlain}, nil
}

func (d *differ) check() error {
	if d.entries > uint64(d.limits.maxFiles) || d.bytes > d.limits.maxBytes {
		return fault{kind: faultTooMany}
	}
	return d.call.stopError()
}

// folder calls itself at most maxDepth deep.
func (d *differ) folder(folder int, prefix string) error {
	names, err := namesOf(folder, int(min(uint64(d.limits.maxFiles)-d.entries, maxFiles))+1)
	if err != nil {
		return err
	}
	d.entries += uint64(len(names))
	if err := d.check(); err != nil {
		return err
	}
	if prefix != "" && len(names) == 0 {
		d.isPlain = false
	}
	slices.Sort(names)
	for _, name := range names {
		stat, err := statAt(folder, name)
		switch {
		case err != nil:
			d.isPlain, err = false, nil
		case kindOf(&stat) == kindFile:
			err = d.file(folder, name, prefix+name)
		case kindOf(&stat) == kindFolder:
			err = d.inside(folder, name, prefix+name)
		default:
			d.isPlain = false
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (d *differ) inside(folder int, name, path string) error {
	if strings.Count(path, "/") >= maxDepth {
		return fault{kind: faultTooMany}
	}
	inner, err := openFolderAt(folder, name)
	if err != nil {
		d.isPlain = false
		return nil
	}
	defer closeFd(inner)
	return d.folder(inner, path+"/")
}

func (d *differ) file(folder int, name, path string) error {
	file, stat, err := openRegular(folder, name)
	if err != nil {
		d.isPlain = false
		return nil
	}
	defer closeFd(file)
	d.bytes += uint64(stat.Size)
	if err := d.check(); err != nil {
		return err
	}
	d.buffer = slices.Grow(d.buffer[:0], int(stat.Size)+1)
	n, err := readAt(file, d.buffer[:stat.Size+1], -1)
	if err != nil || int64(n) != stat.Size || !utf8.ValidString(path) {
		d.isPlain = false
		return nil
	}
	d.seen[path] = true
	return d.compare(path, d.buffer[:n], isExecutable(&stat))
}

func (d *differ) compare(path string, content []byte, executable bool) error {
	if old, ok := d.before[path]; ok && old.executable == executable {
		digest := sha256.Sum256(content)
		if bytes.Equal(digest[:], old.digest[:]) {
			return nil
		}
	}
	written := workspaceFileMessage{path, content, executable}
	return d.call.data(0, encode(&workspaceDiffMessage{written: []workspaceFileMessage{written}}))
}
