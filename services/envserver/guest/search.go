package main

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	maxSearchedBytes = 8 << 20
	sniffedBytes     = 8192
	blockLines       = 64
	defaultSearch    = 20 * time.Second
)

// searcher answers one grep exactly as etude.agent.patterns does, or leaves it to the host.
type searcher struct {
	query   *grepMessage
	matcher *regexp.Regexp
	// What every match contains; may be empty.
	literal []byte
	globs   []*regexp.Regexp
	hidden  bool
	hasEnds bool
	// Matching lines that may still be returned.
	left   int
	buffer []byte
}

func newSearcher(m *grepMessage) (*searcher, error) {
	matcher, literal, err := lineMatcher(m)
	if err != nil {
		return nil, err
	}
	s := &searcher{query: m, matcher: matcher, literal: literal, left: int(m.limit)}
	s.hasEnds = strings.Contains(m.pattern, `\A`) || strings.Contains(m.pattern, `\z`)
	for _, glob := range m.globs {
		compiled, err := globMatcher(glob)
		if err != nil {
			return nil, err
		}
		s.globs = append(s.globs, compiled)
		s.hidden = s.hidden || namesHidden(glob)
	}
	return s, nil
}

// wants is whether the query looks into a file.
func (s *searcher) wants(path string, size int64) bool {
	if size > maxSearchedBytes {
		return false
	}
	if len(s.globs) == 0 {
		return true
	}
	for i, glob := range s.query.globs {
		name := path
		if !strings.Contains(glob, "/") {
			name = path[strings.LastIndexByte(path, '/')+1:]
		}
		if s.globs[i].MatchString(name) {
			return true
		}
	}
	return false
}

// grep sends the matching lines of each file in bytewise order of the paths.
func (c *call) grep(at place, m *grepMessage) error {
	s, err := newSearcher(m)
	if err != nil {
		return err
	}
	limit := defaultSearch
	if m.timeLimitMs > 0 {
		limit = time.Duration(m.timeLimitMs) * time.Millisecond
	}
	deadline := time.Now().Add(limit)
	var paths []string
	walk := at.walk(s.hidden, func(file found) error {
		if s.wants(file.path, file.stat.Size) {
			paths = append(paths, file.path)
		}
		return c.stopError()
	})
	if err := walk.below(m.path); err != nil {
		return err
	}
	slices.Sort(paths)
	for _, path := range paths {
		if time.Now().After(deadline) {
			return fault{kind: faultTooSlow}
		}
		if err := c.grepFile(at, s, path); err != nil {
			return err
		}
	}
	c.endData(1)
	return nil
}

func (c *call) grepFile(at place, s *searcher, path string) error {
	err := s.read(at, path)
	if isSkipped(err) {
		return nil
	}
	if err != nil {
		return err
	}
	hit, isDecided := s.search(path, s.buffer)
	var answer matchesMessage
	if !isDecided {
		answer.undecided = []string{path}
	} else if hit == nil {
		return c.stopError()
	} else {
		answer.files = []fileMatchesMessage{*hit}
	}
	return c.data(1, encode(&answer))
}

// read fills the buffer, which is used again for the next file.
func (s *searcher) read(at place, path string) error {
	folder, name, err := at.parent(path, false)
	if err != nil {
		return err
	}
	defer closeFd(folder)
	file, found, err := openRegular(folder, name)
	if err != nil {
		return err
	}
	defer closeFd(file)
	if found.Size > maxSearchedBytes {
		return fault{kind: faultTooLarge}
	}
	s.buffer = slices.Grow(s.buffer[:0], int(found.Size)+1)
	for {
		if len(s.buffer) == cap(s.buffer) {
			s.buffer = slices.Grow(s.buffer, 1)
		}
		n, err := readAt(file, s.buffer[len(s.buffer):cap(s.buffer)], -1)
		if err != nil || n == 0 {
			return err
		}
		s.buffer = s.buffer[:len(s.buffer)+n]
		if len(s.buffer) > maxSearchedBytes {
			return fault{kind: faultTooLarge}
		}
	}
}

// search is what one file gives; false leaves a file that is not all UTF-8 to the host, whose
// engine sees single bytes where ours sees replacement characters.
func (s *searcher) search(path string, data []byte) (*fileMatchesMessage, bool) {
	if bytes.IndexByte(data[:min(len(data), sniffedBytes)], 0) >= 0 {
		return nil, true
	}
	if !bytes.Contains(data, s.literal) {
		return nil, true
	}
	if !utf8.Valid(data) {
		return nil, false
	}
	if !s.hasEnds && !s.matcher.Match(data) {
		return nil, true
	}
	lines := bytes.Split(data, []byte("\n"))
	if len(lines[len(lines)-1]) == 0 {
		lines = lines[:len(lines)-1]
	}
	var hits []int
	if s.query.multiline {
		hits = crossing(s.matcher, data)
	} else {
		hits = s.within(lines, data)
	}
	if len(hits) == 0 {
		return nil, true
	}
	hit := &fileMatchesMessage{path: path, numMatches: uint32(len(hits))}
	hit.lines = s.withContext(lines, hits)
	return hit, true
}

// within are the matching lines; blocks without any match are passed over in one search.
func (s *searcher) within(lines [][]byte, data []byte) []int {
	var hits []int
	block := blockLines
	if s.hasEnds {
		block = 1
	}
	at := 0
	for start := 0; start < len(lines); start += block {
		some := lines[start:min(start+block, len(lines))]
		end := at - 1
		for _, line := range some {
			end += len(line) + 1
		}
		if block == 1 || s.matches(data[at:end]) {
			for i, line := range some {
				if s.matches(line) {
					hits = append(hits, start+i)
				}
			}
		}
		at = end + 1
	}
	return hits
}

func (s *searcher) matches(text []byte) bool {
	return bytes.Contains(text, s.literal) && s.matcher.Match(text)
}

// withContext are the lines to return, as far as the limit goes.
func (s *searcher) withContext(lines [][]byte, hits []int) []lineMessage {
	var out []lineMessage
	before, after := int(s.query.before), int(s.query.after)
	shown, next := -1, 0
	for _, hit := range hits {
		for i := max(shown+1, hit-before); i < min(len(lines), hit+after+1); i++ {
			for next < len(hits) && hits[next] < i {
				next++
			}
			isMatch := next < len(hits) && hits[next] == i
			if isMatch && s.left <= 0 {
				return trimmed(out)
			}
			if isMatch {
				s.left--
			}
			text := strings.TrimSuffix(string(lines[i]), "\r")
			out = append(out, lineMessage{uint32(i + 1), text, isMatch})
			shown = i
		}
	}
	return trimmed(out)
}

// trimmed leaves out context that stands around no match.
func trimmed(lines []lineMessage) []lineMessage {
	if slices.ContainsFunc(lines, func(line lineMessage) bool { return line.isMatch }) {
		return lines
	}
	return nil
}
