package main

import "sync"

// workers run calls, each one after the other. They stay: the stack of one that has run a call is
// as large as calls need, and to grow a new one is work that each clone would do for the first time.
type workers struct {
	mu   sync.Mutex
	idle []chan *call
}

const maxIdleWorkers = 4

// run hands the call to a worker that is idle, or to a new one.
func (w *workers) run(c *call) {
	var calls chan *call
	w.mu.Lock()
	if n := len(w.idle); n > 0 {
		calls = w.idle[n-1]
		w.idle = w.idle[:n-1]
	}
	w.mu.Unlock()
	if calls == nil {
		calls = make(chan *call, 1)
		go w.work(calls)
	}
	calls <- c
}

func (w *workers) work(calls chan *call) {
	for c := range calls {
		c.run()
		w.mu.Lock()
		isKept := len(w.idle) < maxIdleWorkers
		if isKept {
			w.idle = append(w.idle, calls)
		}
		w.mu.Unlock()
		if !isKept {
			return
		}
	}
}
