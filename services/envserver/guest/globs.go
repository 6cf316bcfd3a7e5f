package main

import (
	"regexp"
	"slices"
	"strings"
)

var globParts = regexp.MustCompile(`(\*+|\?|\[!?\]?[^\]]*\]|\{[^{}]*\})`)

// globMatcher matches whole paths: `*` and `?` within a segment, `**` over segments, `[…]`, `{a,b}`.
// The expression is the one that the host makes of the same pattern.
func globMatcher(pattern string) (*regexp.Regexp, error) {
	segments := strings.Split(strings.TrimPrefix(pattern, "./"), "/")
	var expression strings.Builder
	expression.WriteString(`(?s)\A(?:`)
	for i, segment := range segments {
		isLast := i == len(segments)-1
		switch {
		case segment == "**" && isLast:
			expression.WriteString("(?:.*)")
		case segment == "**":
			expression.WriteString("(?:[^/]+/)*")
		default:
			expression.WriteString(globSegment(segment))
			if !isLast {
				expression.WriteByte('/')
			}
		}
	}
	expression.WriteString(`)\z`)
	compiled, err := regexp.Compile(expression.String())
	if err != nil {
		return nil, refusal{statusUnsupported, err.Error()}
	}
	return compiled, nil
}

func globSegment(segment string) string {
	var out strings.Builder
	at := 0
	for _, part := range globParts.FindAllStringIndex(segment, -1) {
		out.WriteString(globPiece(segment[at:part[0]]))
		out.WriteString(globPiece(segment[part[0]:part[1]]))
		at = part[1]
	}
	out.WriteString(globPiece(segment[at:]))
	return out.String()
}

var letterEscapes = strings.NewReplacer(`\`, `\\`, `[`, `\[`, `^`, `\^`)

func globPiece(part string) string {
	switch {
	case strings.HasPrefix(part, "*"):
		return "[^/]*"
	case part == "?":
		return "[^/]"
	case strings.HasPrefix(part, "[") && strings.HasSuffix(part, "]") && len([]rune(part)) > 2:
		letters := letterEscapes.Replace(part[1 : len(part)-1])
		if strings.HasPrefix(letters, "!") {
			return "[^/" + letters[1:] + "]"
		}
		return "[" + letters + "]"
	case strings.HasPrefix(part, "{") && strings.HasSuffix(part, "}"):
		var choices []string
		for choice := range strings.SplitSeq(part[1:len(part)-1], ",") {
			if choice == "**" || choice == "" {
				choices = append(choices, "[^/]*")
			} else {
				choices = append(choices, globSegment(choice))
			}
		}
		return "(?:" + strings.Join(choices, "|") + ")"
	}
	return regexp.QuoteMeta(part)
}

func isHidden(path string) bool {
	return strings.HasPrefix(path, ".") || strings.Contains(path, "/.")
}

func namesHidden(pattern string) bool { return isHidden(strings.TrimPrefix(pattern, "./")) }

// glob sends the regular files that match, in bytewise order of their paths.
func (c *call) glob(at place, pattern string) error {
	matcher, err := globMatcher(pattern)
	if err != nil {
		return err
	}
	var paths []string
	hidden := namesHidden(pattern)
	walk := at.walk(hidden, func(file found) error {
		if matcher.MatchString(file.path) {
			paths = append(paths, file.path)
		}
		return c.stopError()
	})
	if err := walk.below(""); err != nil {
		return err
	}
	slices.Sort(paths)
	for batch := range slices.Chunk(paths, entryBatch) {
		if err := c.data(0, encode(&pathsMessage{batch})); err != nil {
			return err
		}
	}
	c.endData(0)
	return nil
}

// walk sends every regular file below a path, in the order of the walk.
func (c *call) walk(at place, m *walkMessage) error {
	var batch entriesMessage
	walk := at.walk(m.hidden, func(file found) error {
		batch.entries = append(batch.entries, entryMessage{file.path, kindFile, uint64(file.stat.Size)})
		if len(batch.entries) < entryBatch {
			return c.stopError()
		}
		err := c.data(0, encode(&batch))
		batch.entries = batch.entries[:0]
		return err
	})
	if err := walk.below(m.path); err != nil {
		return err
	}
	if err := c.data(0, encode(&batch)); err != nil {
		return err
	}
	c.endData(0)
	return nil
}
