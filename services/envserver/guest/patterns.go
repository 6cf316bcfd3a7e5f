package main

import (
	"bytes"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"unicode/utf8"
)

const maxCrossing = 1000

// lineMatcher is the query's pattern as RE2 reads it on the host. Go's engine is RE2's sister; what
// they might see differently is refused: tables of Unicode, single bytes, and empty matches across
// lines.
func lineMatcher(m *grepMessage) (*regexp.Regexp, []byte, error) {
	body := m.pattern
	if m.isLiteral {
		body = regexp.QuoteMeta(body)
	} else if !isPortable(m) {
		return nil, nil, refusal{statusUnsupported, "the pattern asks for tables of Unicode"}
	}
	flags := "m"
	if m.ignoreCase {
		flags += "i"
	}
	if m.multiline {
		flags += "s"
	}
	expression := "(?" + flags + ")(?:" + body + ")"
	compiled, err := regexp.Compile(expression)
	if err != nil {
		return nil, nil, refusal{statusUnsupported, err.Error()}
	}
	if m.multiline && canBeEmpty(expression) {
		return nil, nil, refusal{statusUnsupported, "the pattern matches nothing at all"}
	}
	return compiled, required(expression), nil
}

func isPortable(m *grepMessage) bool {
	for _, escape := range []string{`\p`, `\P`, `\C`} {
		if strings.Contains(m.pattern, escape) {
			return false
		}
	}
	mayFold := m.ignoreCase || strings.Contains(m.pattern, "(?")
	isASCII := !strings.ContainsFunc(m.pattern, func(r rune) bool { return r >= utf8.RuneSelf })
	return !mayFold || isASCII && !strings.Contains(m.pattern, `\x`)
}

// required is a text that every match contains, empty if none is known. Looking for it costs a
// fifth of what the engine does.
func required(expression string) []byte {
	parsed, err := syntax.Parse(expression, syntax.Perl)
	if err != nil {
		return nil
	}
	return []byte(literalIn(parsed))
}

// literalIn calls itself as deep as the parser lets patterns nest.
func literalIn(part *syntax.Regexp) string {
	switch part.Op {
	case syntax.OpLiteral:
		isText := !slices.ContainsFunc(part.Rune, func(r rune) bool { return !utf8.ValidRune(r) })
		if part.Flags&syntax.FoldCase == 0 && isText {
			return string(part.Rune)
		}
	case syntax.OpCapture, syntax.OpPlus:
		return literalIn(part.Sub[0])
	case syntax.OpRepeat:
		if part.Min > 0 {
			return literalIn(part.Sub[0])
		}
	case syntax.OpConcat:
		longest := ""
		for _, each := range part.Sub {
			if found := literalIn(each); len(found) > len(longest) {
				longest = found
			}
		}
		return longest
	}
	return ""
}

// canBeEmpty is whether the end of the program is reached without a letter.
func canBeEmpty(expression string) bool {
	parsed, err := syntax.Parse(expression, syntax.Perl)
	if err != nil {
		return true
	}
	program, err := syntax.Compile(parsed.Simplify())
	if err != nil {
		return true
	}
	seen := make([]bool, len(program.Inst))
	open := []uint32{uint32(program.Start)}
	for len(open) > 0 {
		at := open[len(open)-1]
		open = open[:len(open)-1]
		if seen[at] {
			continue
		}
		seen[at] = true
		step := &program.Inst[at]
		switch step.Op {
		case syntax.InstMatch:
			return true
		case syntax.InstAlt, syntax.InstAltMatch:
			open = append(open, step.Out, step.Arg)
		case syntax.InstCapture, syntax.InstNop, syntax.InstEmptyWidth:
			open = append(open, step.Out)
		}
	}
	return false
}

// crossing are the lines that matches cover; their number is bounded, since each match may look at
// all that follows.
func crossing(matcher *regexp.Regexp, data []byte) []int {
	var hits []int
	line, at := 0, 0
	for _, match := range matcher.FindAllIndex(data, maxCrossing) {
		line += bytes.Count(data[at:match[0]], []byte("\n"))
		at = match[0]
		last := max(match[0], match[1]-1)
		for i := 0; i <= bytes.Count(data[at:last], []byte("\n")); i++ {
			hits = append(hits, line+i)
		}
	}
	return slices.Compact(hits)
}
