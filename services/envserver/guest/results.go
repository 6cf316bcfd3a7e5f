package main

import (
	"encoding/binary"
	"slices"
)

const (
	maxResults   = 256
	maxKeptBytes = 4 << 10
)

// keptFrames are the encoded frames of a call's answer, as long as they are short.
type keptFrames struct {
	frames    []byte
	isTooLong bool
}

func (k *keptFrames) add(kind, flags byte, payload []byte) {
	if k.isTooLong = k.isTooLong || len(k.frames)+len(payload) > maxKeptBytes; k.isTooLong {
		k.frames = k.frames[:0]
		return
	}
	k.frames = appendFrame(k.frames, 0, kind, flags, payload)
}

// replayed are the frames as they are sent to a retry.
func (k *keptFrames) replayed(stream uint32) []byte {
	out := slices.Clone(k.frames)
	for at := 0; at < len(out); at += 4 + int(binary.LittleEndian.Uint32(out[at:])) {
		binary.LittleEndian.PutUint32(out[at+4:], stream)
		if out[at+8] == typeResult {
			out[at+9] |= flagReplayed
		}
	}
	return out
}

// resultCache holds the answers of the last calls by id. A call that runs has an entry without an
// answer, so that no id ever runs twice.
type resultCache struct {
	answers map[[idBytes]byte]*keptFrames
	order   [][idBytes]byte
	// An answer that was forgotten; its memory is the next one's.
	spare *keptFrames
}

// earlier is the answer to a call's id, nil while it runs; a new id is entered as running.
func (a *agent) earlier(c *call) ([]byte, bool) {
	key := [idBytes]byte(c.id())
	a.mu.Lock()
	defer a.mu.Unlock()
	cache := &a.results
	if known, ok := cache.answers[key]; ok {
		if known == nil {
			return nil, true
		}
		return known.replayed(c.stream), true
	}
	if cache.answers == nil {
		cache.answers = map[[idBytes]byte]*keptFrames{}
	}
	cache.answers[key] = nil
	if c.kept, cache.spare = cache.spare, nil; c.kept == nil {
		c.kept = &keptFrames{}
	}
	return nil, false
}

// keep enters the answer and forgets the oldest.
func (cache *resultCache) keep(key [idBytes]byte, answer *keptFrames) {
	cache.answers[key] = answer
	cache.order = append(cache.order, key)
	if len(cache.order) > maxResults {
		oldest := cache.answers[cache.order[0]]
		oldest.frames, oldest.isTooLong = oldest.frames[:0], false
		cache.spare = oldest
		delete(cache.answers, cache.order[0])
		cache.order = append(cache.order[:0], cache.order[1:]...)
	}
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
	if c.kept.isTooLong {
		short := resultMessage{status: result.status, fault: result.fault, path: result.path}
		c.kept.frames = appendFrame(c.kept.frames[:0], 0, typeResult, flagNotKept, encode(&short))
	}
	a := c.agent
	a.mu.Lock()
	if c.request.accept == nil {
		a.results.keep([idBytes]byte(c.id()), c.kept)
	} else {
		// Nobody can have a connection twice, and what calls were told is worth more.
		delete(a.results.answers, [idBytes]byte(c.id()))
	}
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
	if c.lent != nil {
		outs.put(c.lent)
		c.lent, c.out = nil, nil
	}
}
