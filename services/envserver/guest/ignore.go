package main

import "strings"

const (
	ignoreName     = ".gitignore"
	maxIgnoreBytes = 256 << 10
	maxIgnoreRules = 4096
	// Steps of one match, whatever a pattern is made of.
	maxMatchSteps = 100_000
)

// ignoreRule is one line of a .gitignore.
type ignoreRule struct {
	segments   []string
	isNegated  bool
	isFolder   bool
	isAnchored bool
}

// ignoreRules are those of one folder, and above it those of the folders that it is in.
type ignoreRules struct {
	above *ignoreRules
	// Path of the folder, with a slash at its end, or nothing for the root.
	prefix string
	rules  []ignoreRule
}

// parseIgnore reads the lines of a .gitignore; too many of them are cut off.
func parseIgnore(text string) []ignoreRule {
	var rules []ignoreRule
	for line := range strings.SplitSeq(text, "\n") {
		if len(rules) >= maxIgnoreRules {
			break
		}
		if rule, ok := parseRule(strings.TrimSuffix(line, "\r")); ok {
			rules = append(rules, rule)
		}
	}
	return rules
}

func parseRule(line string) (ignoreRule, bool) {
	for strings.HasSuffix(line, " ") && !strings.HasSuffix(line, `\ `) {
		line = line[:len(line)-1]
	}
	var rule ignoreRule
	if line == "" || line[0] == '#' {
		return rule, false
	}
	if line[0] == '!' {
		rule.isNegated, line = true, line[1:]
	}
	if strings.HasSuffix(line, "/") {
		rule.isFolder, line = true, line[:len(line)-1]
	}
	rule.isAnchored = strings.Contains(line, "/")
	rule.segments = strings.Split(strings.TrimPrefix(line, "/"), "/")
	return rule, rule.segments[0] != "" || len(rule.segments) > 1
}

// ignores is whether a path below the root is ignored by its own name; that a folder above it is
// ignored is the caller's to know. The last rule that matches decides, and inner folders come first.
func (r *ignoreRules) ignores(path string, isFolder bool) bool {
	for ; r != nil; r = r.above {
		below := strings.Split(path[len(r.prefix):], "/")
		for i := len(r.rules) - 1; i >= 0; i-- {
			rule := &r.rules[i]
			if (isFolder || !rule.isFolder) && rule.matches(below) {
				return !rule.isNegated
			}
		}
	}
	return false
}

func (r *ignoreRule) matches(path []string) bool {
	steps := maxMatchSteps
	if !r.isAnchored {
		return matchName(r.segments[0], path[len(path)-1], &steps)
	}
	return matchPath(r.segments, path, &steps)
}

// matchPath matches segments: `**` is any number of them, at the end at least one. Like matchName it
// only ever returns to its last star, which is enough, and takes time by the product of the lengths.
func matchPath(pattern, path []string, steps *int) bool {
	p, at, star, from := 0, 0, -1, 0
	for at < len(path) {
		switch {
		case p < len(pattern) && pattern[p] == "**":
			if p == len(pattern)-1 {
				return true
			}
			star, from = p, at
			p++
		case p < len(pattern) && matchName(pattern[p], path[at], steps):
			p++
			at++
		case star >= 0:
			from++
			p, at = star+1, from
		default:
			return false
		}
		if *steps--; *steps < 0 {
			return false
		}
	}
	return p == len(pattern)
}

// matchName matches one segment: `*`, `?`, `[…]` and `\`, as fnmatch(3) does.
func matchName(pattern, name string, steps *int) bool {
	p, at, star, from := 0, 0, -1, 0
	for at < len(name) {
		if *steps--; *steps < 0 {
			return false
		}
		if p < len(pattern) && pattern[p] == '*' {
			star, from = p, at
			p++
			continue
		}
		if width, ok := matchLetter(pattern[p:], name[at]); ok {
			p += width
			at++
			continue
		}
		if star < 0 {
			return false
		}
		from++
		p, at = star+1, from
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}

// matchLetter matches one byte with the beginning of a pattern, and says how long that is.
func matchLetter(pattern string, letter byte) (int, bool) {
	if pattern == "" {
		return 0, false
	}
	switch pattern[0] {
	case '?':
		return 1, true
	case '\\':
		if len(pattern) == 1 {
			return 0, false
		}
		return 2, pattern[1] == letter
	case '[':
		return matchClass(pattern, letter)
	}
	return 1, pattern[0] == letter
}

func matchClass(pattern string, letter byte) (int, bool) {
	at, isNegated, isIn := 1, false, false
	if at < len(pattern) && (pattern[at] == '!' || pattern[at] == '^') {
		isNegated = true
		at++
	}
	for first := true; at < len(pattern) && (first || pattern[at] != ']'); first = false {
		low, width := classLetter(pattern[at:])
		at += width
		high := low
		if at+1 < len(pattern) && pattern[at] == '-' && pattern[at+1] != ']' {
			high, width = classLetter(pattern[at+1:])
			at += 1 + width
		}
		isIn = isIn || low <= letter && letter <= high
	}
	if at >= len(pattern) {
		return 0, false // a class without an end matches nothing
	}
	return at + 1, isIn != isNegated
}

func classLetter(pattern string) (byte, int) {
	if pattern[0] == '\\' && len(pattern) > 1 {
		return pattern[1], 2
	}
	return pattern[0], 1
}

// inFolder are the rules of an open folder on top of these.
func (r *ignoreRules) inFolder(folder int, prefix string) *ignoreRules {
	file, stat, err := openRegular(folder, ignoreName)
	if err != nil {
		return r
	}
	defer closeFd(file)
	text := make([]byte, min(stat.Size, maxIgnoreBytes))
	n, err := readAt(file, text, 0)
	if err != nil || n <= 0 {
		return r
	}
	rules := parseIgnore(string(text[:n]))
	if len(rules) == 0 {
		return r
	}
	return &ignoreRules{above: r, prefix: prefix, rules: rules}
}
