package main

const (
	maxResults   = 256
	maxKeptBytes = 4 << 10
)

// keptFrames are the answer of a call as long as it is short: kind, flags and payload of each frame.
type keptFrames struct {
	frames    []frame
	bytes     int
	isTooLong bool
}

func (k *keptFrames) add(kind, flags byte, payload []byte) {
	k.bytes += len(payload)
	if k.isTooLong = k.isTooLong || k.bytes > maxKeptBytes; k.isTooLong {
		k.frames = nil
		return
	}
	k.frames = append(k.frames, frame{0, kind, flags, append([]byte(nil), payload...)})
}

// resultCache holds the answers of the last calls by id. A call that runs has an entry without an
// answer, so that no id ever runs twice.
type resultCache struct {
	answers map[[idBytes]byte]*keptFrames
	order   [][idBytes]byte
}

// earlier is the answer to a call's id; a new id is entered as running.
func (a *agent) earlier(c *call) (*keptFrames, bool) {
	key := [idBytes]byte(c.id())
	a.mu.Lock()
	defer a.mu.Unlock()
	cache := &a.results
	if known, ok := cache.answers[key]; ok {
		return known, true
	}
	if cache.answers == nil {
		cache.answers = map[[idBytes]byte]*keptFrames{}
	}
	cache.answers[key] = nil
	return nil, false
}

// keep enters the answer and forgets the oldest.
func (cache *resultCache) keep(key [idBytes]byte, answer *keptFrames) {
	cache.answers[key] = answer
	cache.order = append(cache.order, key)
	if len(cache.order) > maxResults {
		delete(cache.answers, cache.order[0])
		cache.order = append(cache.order[:0], cache.order[1:]...)
	}
}

// answer sends what an earlier call with this id was told.
func (c *call) answer(earlier *keptFrames) {
	if earlier == nil {
		c.refuse(statusBusy, "the call with this id still runs")
		return
	}
	var out []byte
	for _, each := range earlier.frames {
		flags := each.flags
		if each.kind == typeResult {
			flags |= flagReplayed
		}
		out = appendFrame(out, c.stream, each.kind, flags, each.payload)
	}
	c.close(out)
}

// abandon refuses a call as if it had never come, so that a retry may run.
func (c *call) abandon(why status, text string) {
	c.agent.mu.Lock()
	delete(c.agent.results.answers, [idBytes]byte(c.id()))
	c.agent.mu.Unlock()
	c.refuse(why, text)
}

// refuse closes the stream of a call that did nothing; the id stays free.
func (c *call) refuse(why status, text string) {
	result := resultMessage{status: why, message: text}
	c.close(appendFrame(nil, c.stream, typeResult, 0, encode(&result)))
}

// finish closes the stream with its result, and remembers it for a retry.
func (c *call) finish(result *resultMessage) {
	payload := c.encoded(result)
	c.put(typeResult, 0, payload)
	answer := &c.kept
	if answer.isTooLong {
		short := resultMessage{status: result.status, fault: result.fault, path: result.path}
		answer = &keptFrames{frames: []frame{{0, typeResult, flagNotKept, encode(&short)}}}
	}
	a := c.agent
	a.mu.Lock()
	a.results.keep([idBytes]byte(c.id()), answer)
	a.mu.Unlock()
	c.close(c.out)
}

// encoded is the result; a message that does not fit a frame is left out.
func (c *call) encoded(result *resultMessage) []byte {
	payload := encode(result)
	if len(payload) > maxPayload {
		result.message = ""
		payload = encode(result)
	}
	return payload
}

// close sends the last frames and forgets the stream.
func (c *call) close(frames []byte) {
	a := c.agent
	a.mu.Lock()
	if a.calls[c.stream] == c {
		delete(a.calls, c.stream)
	}
	a.mu.Unlock()
	a.port.send(frames, func() bool { return c.isOver })
	c.out = nil
}
