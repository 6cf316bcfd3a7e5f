package main

import (
	"strings"
	"syscall"
)

// found is one regular file on the way.
type found struct {
	path string
	stat syscall.Stat_t
}

// walk is one pass over the regular files below a folder, bounded in depth and number.
type walk struct {
	place       place
	hidden      bool
	entriesLeft int
	visit       func(found) error
}

func (p place) walk(hidden bool, visit func(found) error) *walk {
	return &walk{place: p, hidden: hidden, entriesLeft: maxFiles, visit: visit}
}

// below passes the file with this path, or the files below the folder with this path.
func (w *walk) below(path string) error {
	folder, name, err := w.place.parent(path, false)
	if err != nil {
		return err
	}
	defer closeFd(folder)
	stat, err := statAt(folder, name)
	if err != nil {
		return err
	}
	if kindOf(&stat) == kindFile {
		return w.visit(found{path, stat})
	}
	if name == "" {
		name = "."
	}
	inner, err := w.place.enter(folder, name, path, false)
	if err != nil {
		return err
	}
	defer closeFd(inner)
	if path != "" {
		path += "/"
	}
	return w.files(inner, path)
}

// files passes the files below an open folder, each folder in bytewise order. It calls itself at
// most maxDepth deep.
func (w *walk) files(folder int, prefix string) error {
	tooMany := faultAt(faultTooMany, strings.TrimRight(prefix, "/"))
	entries, err := listFolder(folder, w.entriesLeft, tooMany)
	if err != nil {
		return err
	}
	w.entriesLeft -= len(entries)
	for i := range entries {
		each := &entries[i]
		if each.name[0] == '.' && !w.hidden {
			continue
		}
		path := prefix + each.name
		switch kindOf(&each.stat) {
		case kindFile:
			err = w.visit(found{path, each.stat})
		case kindFolder:
			err = w.inside(folder, each.name, path)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *walk) inside(folder int, name, path string) error {
	if strings.Count(path, "/") >= maxDepth {
		return nil
	}
	inner, err := w.place.enter(folder, name, path, false)
	if isSkipped(err) || err == syscall.ENOTDIR {
		return nil // gone, exchanged or closed while we walked: as if it were not there
	}
	if err != nil {
		return err
	}
	defer closeFd(inner)
	return w.files(inner, path+"/")
}
