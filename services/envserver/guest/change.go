package main

import (
	"bytes"
	"crypto/sha256"
	"strings"
	"syscall"
	"unicode/utf8"
)

const (
	maxBaseBytes = 64 << 20
	// Names that are looked at beside those of the base.
	maxOtherNames = 200_000
	repository    = ".git"
)

// baseCursor walks over the files that the host lists, in the order of the walk.
type baseCursor struct {
	rest []byte
	next baseFileMessage
	has  bool
}

// advance reads the next file of the list.
func (b *baseCursor) advance() error {
	v := visitor{}
	b.has = len(b.rest) > 0
	if !b.has {
		return nil
	}
	b.rest = v.read(b.rest)
	b.next = baseFileMessage{}
	if v.err != nil || !v.is(1, wireBytes) || decode(v.raw, &b.next) != nil {
		return refusal{statusInvalid, "not a list of files"}
	}
	return nil
}

// isBelow is whether the next file is in a folder, whose path ends with a slash.
func (b *baseCursor) isBelow(prefix string) bool {
	return b.has && strings.HasPrefix(b.next.path, prefix)
}

// name is the next file's, or its folder's, in a folder that it is below.
func (b *baseCursor) name(prefix string) string {
	name, _, _ := strings.Cut(b.next.path[len(prefix):], "/")
	return name
}

// changer finds what differs from the files that a workspace began with: changed and missing ones of
// those, and new ones that the repository does not ignore. What it ignores is not even listed.
type changer struct {
	call    *call
	place   place
	base    baseCursor
	limits  *changeMessage
	names   int
	files   uint32
	bytes   uint64
	deleted workspaceDiffMessage
}

func (c *call) change(at place, m *changeMessage) error {
	d := &changer{call: c, place: at, limits: m}
	for {
		piece, err := c.receive(nil)
		if err != nil {
			return err
		}
		if piece == nil {
			break
		}
		if d.base.rest = append(d.base.rest, piece...); len(d.base.rest) > maxBaseBytes {
			return refusal{statusTooLarge, "the list of files is too long"}
		}
	}
	if err := d.base.advance(); err != nil {
		return err
	}
	root, err := at.folder("", false)
	if err != nil {
		return err
	}
	defer closeFd(root)
	if err := d.folder(root, "", nil); err != nil {
		return err
	}
	if d.base.has {
		return refusal{statusInvalid, "the list of files is not in order"}
	}
	if err := c.data(0, encode(&d.deleted)); err != nil {
		return err
	}
	c.endData(0)
	return nil
}

// count adds one change; more than the limits are a fault.
func (d *changer) count(size uint64) error {
	d.files++
	d.bytes += size
	if d.files > d.limits.maxFiles || d.bytes > d.limits.maxBytes {
		return fault{kind: faultTooMany}
	}
	return d.call.stopError()
}

// folder compares an open folder; it calls itself at most maxDepth deep.
func (d *changer) folder(folder int, prefix string, above *ignoreRules) error {
	rules := above.inFolder(folder, prefix)
	entries, err := d.entries(folder)
	if err != nil {
		return err
	}
	for i := range entries {
		each := &entries[i]
		if err := d.missingBefore(prefix, each.name); err != nil {
			return err
		}
		if err := d.entry(folder, prefix, each, rules); err != nil {
			return err
		}
	}
	return d.missingBefore(prefix, "")
}

func (d *changer) entries(folder int) ([]entry, error) {
	found, err := listFolder(folder, maxOtherNames-d.names, fault{kind: faultTooMany})
	d.names += len(found)
	if err == nil {
		err = d.call.stopError()
	}
	return found, err
}

// missingBefore are the files of the base that come before a name of a folder, or with no name all
// that are left of the folder: they are gone.
func (d *changer) missingBefore(prefix, name string) error {
	for d.base.isBelow(prefix) && (name == "" || d.base.name(prefix) < name) {
		if err := d.missing(); err != nil {
			return err
		}
	}
	return nil
}

func (d *changer) missing() error {
	d.deleted.deleted = append(d.deleted.deleted, d.base.next.path)
	if err := d.count(0); err != nil {
		return err
	}
	return d.base.advance()
}

func (d *changer) entry(folder int, prefix string, each *entry, rules *ignoreRules) error {
	path := prefix + each.name
	isTracked := d.base.has && d.base.next.path == path
	switch kindOf(&each.stat) {
	case kindFile:
		if isTracked {
			return d.tracked(folder, each)
		}
		if err := d.missingBelow(path + "/"); err != nil {
			return err
		}
		if !isPossible(path) || each.name == repository || rules.ignores(path, false) {
			return nil
		}
		return d.written(folder, each.name, path, nil)
	case kindFolder:
		if isTracked {
			if err := d.missing(); err != nil {
				return err
			}
		}
		return d.inside(folder, path, each, rules)
	}
	if isTracked {
		return d.missing()
	}
	return d.missingBelow(path + "/")
}

func (d *changer) missingBelow(prefix string) error {
	for d.base.isBelow(prefix) {
		if err := d.missing(); err != nil {
			return err
		}
	}
	return nil
}

// inside compares a folder in an open folder. Of one that is ignored only the files of the base are.
func (d *changer) inside(folder int, path string, each *entry, rules *ignoreRules) error {
	hasTracked := d.base.isBelow(path + "/")
	isIgnored := each.name == repository || !isPossible(path+"/x") || rules.ignores(path, true)
	if isIgnored && !hasTracked {
		return nil
	}
	if isIgnored {
		return d.trackedBelow(path + "/")
	}
	inner, err := openFolderAt(folder, each.name)
	if err != nil {
		return d.missingBelow(path + "/")
	}
	defer closeFd(inner)
	return d.folder(inner, path+"/", rules)
}

// trackedBelow compares the files of the base in a folder, without a look at what else is there.
func (d *changer) trackedBelow(prefix string) error {
	for d.base.isBelow(prefix) {
		if err := d.trackedAt(d.base.next.path); err != nil {
			return err
		}
	}
	return nil
}

func (d *changer) trackedAt(path string) error {
	folder, name, err := d.place.parent(path, false)
	if isSkipped(err) || err == syscall.ENOTDIR {
		return d.missing()
	}
	if err != nil {
		return err
	}
	defer closeFd(folder)
	stat, err := statAt(folder, name)
	if err != nil || kindOf(&stat) != kindFile {
		return d.missing()
	}
	return d.tracked(folder, &entry{name, stat})
}

// tracked compares a file of the base. One that was not written since is not read.
func (d *changer) tracked(folder int, each *entry) error {
	base := d.base.next
	if err := d.base.advance(); err != nil {
		return err
	}
	isSame := base.executable == isExecutable(&each.stat) && base.size == uint64(each.stat.Size)
	if isSame && base.mtimeNs != 0 && base.mtimeNs == each.stat.Mtim.Nano() {
		return d.call.stopError()
	}
	var digest []byte
	if isSame {
		digest = base.sha256
	}
	return d.written(folder, each.name, base.path, digest)
}

// written sends a file, unless it has the digest that is given.
func (d *changer) written(folder int, name, path string, digest []byte) error {
	file, stat, err := openRegular(folder, name)
	if isSkipped(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer closeFd(file)
	if uint64(stat.Size) > d.limits.maxBytes || !utf8.ValidString(path) {
		return fault{kind: faultTooMany}
	}
	content := make([]byte, stat.Size+1)
	n, err := readAll(file, content)
	if err != nil {
		return err
	}
	content = content[:n]
	if found := sha256.Sum256(content); digest != nil && bytes.Equal(found[:], digest) {
		return nil
	}
	if err := d.count(uint64(n)); err != nil {
		return err
	}
	written := workspaceFileMessage{path, content, isExecutable(&stat)}
	return d.call.data(0, encode(&workspaceDiffMessage{written: []workspaceFileMessage{written}}))
}

// readAll reads until the buffer is full or the file ends; one that grows meanwhile is cut.
func readAll(file int, into []byte) (int, error) {
	total := 0
	for total < len(into) {
		n, err := readAt(file, into[total:], -1)
		if err != nil || n == 0 {
			return total, err
		}
		total += n
	}
	return total, nil
}
