package main

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"unicode/utf8"
)

// Paths are walked from the root one descriptor at a time and no link is followed, so nothing
// outside of the root is touched, also while folders are exchanged for links underneath.

const (
	openFolder = syscall.O_RDONLY | syscall.O_DIRECTORY | syscall.O_NOFOLLOW | syscall.O_CLOEXEC
	openRead   = syscall.O_RDONLY | syscall.O_NOFOLLOW | syscall.O_NONBLOCK | syscall.O_NOCTTY | syscall.O_CLOEXEC
	openNew    = syscall.O_WRONLY | syscall.O_CREAT | syscall.O_EXCL | syscall.O_NOFOLLOW | syscall.O_CLOEXEC

	openPath = 0x200000 | syscall.O_NOFOLLOW | syscall.O_CLOEXEC

	maxFileBytes = 8 << 20
	maxFiles     = 100_000
	maxDepth     = 64
	maxPathBytes = 1024
	maxNameBytes = 255

	noFollow = 0x100
)

// followsLinks is whether the kernel follows a link to a folder that it is told not to follow: gVisor
// does where it is also told that it shall be a folder.
var followsLinks = sync.OnceValue(func() bool {
	folder, err := openAt(-100, "/proc/self/root", openFolder, 0)
	if err == nil {
		closeFd(folder)
	}
	return err == nil
})

// openFolderAt opens a folder in an open folder, and no link to one.
func openFolderAt(folder int, name string) (int, error) {
	if !followsLinks() {
		return openAt(folder, name, openFolder, 0)
	}
	found, err := openAt(folder, name, openPath, 0)
	if err != nil {
		return -1, err
	}
	defer closeFd(found)
	var what syscall.Stat_t
	if err := syscall.Fstat(found, &what); err != nil {
		return -1, err
	}
	if what.Mode&syscall.S_IFMT != syscall.S_IFDIR {
		return -1, syscall.ENOTDIR
	}
	return openAt(found, ".", openFolder, 0)
}

// isPossible is whether the host's own check of a path would have let it pass.
func isPossible(path string) bool {
	if len(path) > maxPathBytes || strings.Count(path, "/") >= maxDepth || !utf8.ValidString(path) {
		return false
	}
	for name := range strings.SplitSeq(path, "/") {
		isBad := name == "" || name == "." || name == ".." || strings.Contains(name, "\x00")
		if path != "" && (isBad || len(name) > maxNameBytes) {
			return false
		}
	}
	return true
}

// place is where names start: a folder, and who owns what is made in it.
type place struct {
	root string
	// Negative leaves files to the agent's own user.
	owner int
}

// parent is an open folder and a name in it; the name of the root is empty.
func (p place) parent(path string, create bool) (int, string, error) {
	if !isPossible(path) {
		return -1, "", fault{kind: faultBadName}
	}
	at := strings.LastIndexByte(path, '/')
	folder, err := p.folder(path[:max(at, 0)], create)
	return folder, path[at+1:], err
}

func (p place) folder(path string, create bool) (int, error) {
	at, err := openAt(-100, p.root, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return -1, refusal{statusInternal, p.root + ": " + err.Error()}
	}
	if path == "" {
		return at, nil
	}
	for name := range strings.SplitSeq(path, "/") {
		inner, err := p.enter(at, name, path, create)
		closeFd(at)
		if err != nil {
			return -1, err
		}
		at = inner
	}
	return at, nil
}

// enter opens a folder in an open folder; a link in its place is a fault of the given path.
func (p place) enter(folder int, name, path string, create bool) (int, error) {
	inner, err := openFolderAt(folder, name)
	switch {
	case err == syscall.ENOENT && create:
		made := syscall.Mkdirat(folder, name, 0o755)
		if made != nil && made != syscall.EEXIST {
			return -1, made
		}
		if made == nil && p.owner >= 0 {
			if err := syscall.Fchownat(folder, name, p.owner, p.owner, noFollow); err != nil {
				return -1, err
			}
		}
		return openFolderAt(folder, name)
	case err == syscall.ENOTDIR:
		// The kernel answers alike for a link and for a file in the place of a folder.
		found, failed := statAt(folder, name)
		if failed != nil {
			return -1, failed
		}
		if found.Mode&syscall.S_IFMT == syscall.S_IFLNK {
			return -1, faultAt(faultLink, path)
		}
	}
	return inner, err
}

func checkRegular(found *syscall.Stat_t) error {
	switch found.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		return nil
	case syscall.S_IFDIR:
		return fault{kind: faultIsFolder}
	case syscall.S_IFLNK:
		return fault{kind: faultLink}
	}
	return fault{kind: faultNotFile}
}

// openRegular opens a file for reading. It is looked at before, so that no device is touched, and
// again after, as it may change.
func openRegular(folder int, name string) (int, syscall.Stat_t, error) {
	found, err := statAt(folder, name)
	if err == nil {
		err = checkRegular(&found)
	}
	if err != nil {
		return -1, found, err
	}
	file, err := openAt(folder, name, openRead, 0)
	if err != nil {
		return -1, found, err
	}
	if err = statFd(file, &found); err == nil {
		err = checkRegular(&found)
	}
	if err != nil {
		closeFd(file)
	}
	return file, found, err
}

func kindOf(found *syscall.Stat_t) kind {
	switch found.Mode & syscall.S_IFMT {
	case syscall.S_IFDIR:
		return kindFolder
	case syscall.S_IFREG:
		return kindFile
	}
	return kindOther
}

// entry is one name of a folder, as it was when it was listed.
type entry struct {
	name string
	stat syscall.Stat_t
}

func (e *entry) size() uint64 {
	if kindOf(&e.stat) == kindFile {
		return uint64(e.stat.Size)
	}
	return 0
}

// listed are the names of one folder in bytewise order, without those that are no text; more than
// the limit are the given error.
func listFolder(folder, limit int, tooMany error) ([]entry, error) {
	names, err := namesOf(folder, limit+1)
	if err != nil {
		return nil, err
	}
	found := make([]entry, 0, len(names))
	for _, name := range names {
		if len(found) >= limit {
			return nil, tooMany
		}
		if !utf8.ValidString(name) {
			continue
		}
		stat, err := statAt(folder, name)
		if err == nil {
			found = append(found, entry{name, stat})
		} else if err != syscall.ENOENT {
			return nil, err
		}
	}
	slices.SortFunc(found, func(a, b entry) int { return cmp.Compare(a.name, b.name) })
	return found, nil
}

// namesOf are the names of a folder that was just opened, at least as many as asked for if there
// are so many.
func namesOf(folder, atLeast int) ([]string, error) {
	buffer := chunks.get()
	defer chunks.put(buffer)
	var names []string
	for text := 0; text < atLeast; {
		n, err := readNames(folder, *buffer)
		if err != nil || n <= 0 {
			return names, err
		}
		before := len(names)
		_, _, names = syscall.ParseDirent((*buffer)[:n], -1, names)
		for _, name := range names[before:] {
			if utf8.ValidString(name) {
				text++
			}
		}
	}
	return names, nil
}
