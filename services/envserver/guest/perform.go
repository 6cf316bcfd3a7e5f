package main

import "strings"

// isShort is whether the answers of other calls may wait for this one's.
func (m *callMessage) isShort() bool { return m.read != nil || m.stat != nil || m.delete != nil }

// perform does what the call asks; nil and nil is plain success.
func (c *call) perform() (*resultMessage, error) {
	m := &c.request
	at := c.agent.place
	if m.uid != nil {
		at.owner = int(*m.uid)
	}
	if m.cwd != "" {
		if !strings.HasPrefix(m.cwd, "/") {
			return nil, refusal{statusInvalid, "cwd is not absolute"}
		}
		at.root = m.cwd
	}
	switch {
	case m.read != nil:
		return c.read(at, m.read)
	case m.write != nil:
		return c.write(at, m.write)
	case m.list != nil:
		return nil, c.list(at, m.list.path)
	case m.stat != nil:
		return at.stat(m.stat.path)
	case m.delete != nil:
		return nil, at.delete(m.delete.path)
	}
	return c.search(at, m)
}

func (c *call) search(at place, m *callMessage) (*resultMessage, error) {
	switch {
	case m.glob != nil:
		return nil, c.glob(at, m.glob.pattern)
	case m.walk != nil:
		return nil, c.walk(at, m.walk)
	case m.grep != nil:
		return nil, c.grep(at, m.grep)
	case m.hashes != nil:
		return nil, c.hashes(at, m.hashes.path)
	case m.mark != nil:
		return nil, c.mark(at, m.mark.name)
	case m.diff != nil:
		return c.diff(at, m.diff)
	case m.apply != nil:
		return nil, c.apply(at, m.apply)
	case m.change != nil:
		return nil, c.change(at, m.change)
	}
	return c.command(at, m)
}

func (c *call) command(at place, m *callMessage) (*resultMessage, error) {
	switch {
	case m.exec != nil && m.exec.session != "":
		return c.execInSession(m.exec)
	case m.exec != nil && m.exec.background:
		return c.execInBackground(at, m.exec)
	case m.exec != nil:
		return c.exec(at, m.exec)
	case m.job != nil:
		return c.job(m.job)
	case m.session != nil:
		return nil, c.session(at, m.session)
	case m.accept != nil:
		return nil, c.accept(m.accept)
	case m.freeze != nil:
		return nil, c.agent.freeze(true)
	case m.thaw != nil:
		return nil, c.agent.freeze(false)
	}
	return nil, refusal{statusInvalid, "the call asks for nothing that is known here"}
}
