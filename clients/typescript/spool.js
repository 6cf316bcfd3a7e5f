// Spool of feedback events: a file of JSON lines that a killed process leaves whole.
//
//   events.jsonl   events in the order in which they were added. It is appended to, and replaced by
//                  its rest once more of it is done with than waits
//   state.json     bytes of events.jsonl that are done with, and counts; replaced atomically
//
// The files are those of the Python client. A crash can only repeat what was sent: every event has
// an id of its own, by which the service knows it again.

import fs from "node:fs";
import path from "node:path";

export const MAX_BYTES = 16 << 20;
const COMPACT_BYTES = 256 << 10;
const MAX_REASONS = 64;
const REASON = /^[0-9]{0,3} ?[A-Za-z]{1,64}$/;

export class EventSpool {
  constructor(folder, { maxBytes = MAX_BYTES } = {}) {
    this.folder = folder;
    this.maxBytes = maxBytes;
  }

  append(line) {
    const { file, state } = this.#open();
    try {
      const data = Buffer.from(line + "\n");
      const waiting = fs.fstatSync(file).size - state.offset;
      if (waiting + data.length > this.maxBytes) {
        this.#count(state, { SpoolFull: 1 });
        return false;
      }
      appendData(file, data);
      return true;
    } finally {
      fs.closeSync(file);
    }
  }

  refuse(reason) {
    const { file, state } = this.#open();
    fs.closeSync(file);
    this.#count(state, { [reason]: 1 });
  }

  readBatch({ maxEvents, maxBytes }) {
    const { file, state } = this.#open();
    fs.closeSync(file);
    const data = fs.readFileSync(this.#path("events.jsonl")).subarray(state.offset);
    const lines = [];
    let size = 0;
    while (lines.length < maxEvents && size < data.length) {
      const end = data.indexOf(10, size) + 1;
      if (lines.length && end > maxBytes) break;
      lines.push(data.toString("utf8", size, end - 1));
      size = end;
    }
    const { generation, offset } = state;
    return { lines, generation, start: offset, end: offset + size };
  }

  commit(batch, { numSent, givenUp, again = [] }) {
    const { file, state } = this.#open();
    try {
      if (state.generation !== batch.generation || state.offset !== batch.start) return;
      if (again.length) appendData(file, Buffer.from(again.map((line) => line + "\n").join("")));
      state.offset = batch.end;
      state.sent += numSent;
      const { size } = fs.fstatSync(file);
      if (state.offset === size) empty(file, state);
      this.#count(state, givenUp);
      if (state.offset > Math.max(size - state.offset, COMPACT_BYTES)) this.#compact(state);
    } finally {
      fs.closeSync(file);
    }
  }

  clear() {
    const number = this.readBatch({ maxEvents: Infinity, maxBytes: Infinity }).lines.length;
    const { file, state } = this.#open();
    empty(file, state);
    fs.closeSync(file);
    this.#count(state, number ? { Revoked: number } : {});
    return number;
  }

  readCounts() {
    const { file, state } = this.#open();
    const waitingBytes = fs.fstatSync(file).size - state.offset;
    fs.closeSync(file);
    return { waitingBytes, numSent: state.sent, givenUp: state.givenUp };
  }

  #path(name) {
    return path.join(this.folder, name);
  }

  // Opens file and state, as a crash may have left them, repaired.
  #open() {
    fs.mkdirSync(this.folder, { recursive: true, mode: 0o700 });
    const isNew = !fs.existsSync(this.#path("events.jsonl"));
    const flags = fs.constants.O_RDWR | fs.constants.O_CREAT;
    const file = fs.openSync(this.#path("events.jsonl"), flags, 0o600);
    if (isNew) syncFolder(this.folder);
    const state = readState(this.#path("state.json"));
    cutTornLine(file, this.#path("events.jsonl"));
    if (state.offset > fs.fstatSync(file).size) {
      // Emptied, and killed before the state said so.
      Object.assign(state, { generation: state.generation + 1, offset: 0 });
      this.#write(state);
    }
    return { file, state };
  }

  #count(state, givenUp) {
    for (const [reason, number] of Object.entries(givenUp)) {
      const isKnown =
        Object.hasOwn(state.givenUp, reason) || Object.keys(state.givenUp).length < MAX_REASONS;
      const name = isKnown && REASON.test(reason) ? reason : "Other";
      state.givenUp[name] = (state.givenUp[name] ?? 0) + number;
    }
    this.#write(state);
  }

  // Replaces the file by its rest; killed in between, what was sent is sent again.
  #compact(state) {
    const rest = fs.readFileSync(this.#path("events.jsonl")).subarray(state.offset);
    Object.assign(state, { generation: state.generation + 1, offset: 0 });
    // First: the old offset must not point into the new file.
    this.#write(state);
    this.#replace("events.jsonl", rest);
  }

  // On the disk before the next append: an old offset must not point into newer events.
  #write(state) {
    this.#replace("state.json", Buffer.from(JSON.stringify(state)));
  }

  #replace(name, data) {
    const partial = this.#path(`${name}.partial`);
    const file = fs.openSync(partial, "w", 0o600);
    appendData(file, data);
    fs.closeSync(file);
    fs.renameSync(partial, this.#path(name));
    syncFolder(this.folder);
  }
}

function appendData(file, data) {
  let place = fs.fstatSync(file).size;
  for (let done = 0; done < data.length; ) {
    const written = fs.writeSync(file, data, done, data.length - done, place);
    done += written;
    place += written;
  }
  fs.fsyncSync(file);
}

function empty(file, state) {
  fs.ftruncateSync(file, 0);
  state.generation += 1;
  state.offset = 0;
}

function cutTornLine(file, name) {
  const size = fs.fstatSync(file).size;
  const last = Buffer.alloc(1);
  if (size === 0 || (fs.readSync(file, last, 0, 1, size - 1) === 1 && last[0] === 10)) return;
  fs.ftruncateSync(file, fs.readFileSync(name).lastIndexOf(10) + 1);
}

// A damaged state is as none, and what was sent is sent again.
function readState(name) {
  const none = { generation: 0, offset: 0, sent: 0, givenUp: {} };
  try {
    const { generation, offset, sent, givenUp } = JSON.parse(fs.readFileSync(name, "utf8"));
    const numbers = [generation, offset, sent, ...Object.values(givenUp)];
    const isSound = numbers.every((each) => Number.isSafeInteger(each) && each >= 0);
    return isSound ? { generation, offset, sent, givenUp } : none;
  } catch {
    return none;
  }
}

function syncFolder(folder) {
  const descriptor = fs.openSync(folder, "r");
  fs.fsyncSync(descriptor);
  fs.closeSync(descriptor);
}
