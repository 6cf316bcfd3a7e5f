// Client of feedback events: spools them, sends them in batches, and loses none.
//
// The twin of etude/common/feedback/client.py: what one does, the other does.

import { createHmac, randomUUID } from "node:crypto";
import { setTimeout as sleepMs } from "node:timers/promises";

export { EventSpool } from "./spool.js";

const BATCH_EVENTS = 100;
const BATCH_BYTES = 1 << 20;
const MAX_EVENT_BYTES = 256 << 10;
const MAX_EDIT_LINES = 4096;
const FIRST_WAIT_S = 0.5;
const LONGEST_WAIT_S = 60;
const REQUEST_MS = 40_000;
const MAX_ANSWER_BYTES = 1 << 20;
const LATER = new Set([408, 425, 429]);
const TOO_MUCH = new Set([400, 413]);
const LOCAL = new Set(["127.0.0.1", "[::1]", "localhost"]);

export class EventClient {
  #batchEvents = BATCH_EVENTS;

  constructor({ spool, post, author, consent, now, makeId, sleep, monotonic }) {
    this.spool = spool;
    this.post = post;
    this.author = author;
    this.consent = consent;
    this.now = now ?? (() => new Date());
    this.makeId = makeId ?? (() => randomUUID().replaceAll("-", ""));
    this.sleep = sleep ?? ((seconds) => sleepMs(seconds * 1000));
    this.monotonic = monotonic ?? (() => performance.now() / 1000);
  }

  add(kind, payload, about, { eventId = "" } = {}) {
    if (!this.consent?.granted) return "";
    const id = eventId || this.makeId();
    const time = this.now();
    const event = makeEvent(kind, payload, about, this.author, this.consent, { id, time });
    const line = JSON.stringify(event);
    if (Buffer.byteLength(line) > MAX_EVENT_BYTES) {
      this.spool.refuse("TooLarge");
      return "";
    }
    return this.spool.append(line) ? id : "";
  }

  async flush({ timeoutS = 10 } = {}) {
    const deadlineS = this.monotonic() + timeoutS;
    let numSent = 0;
    let numFailures = 0;
    for (;;) {
      const batch = this.spool.readBatch({ maxEvents: this.#batchEvents, maxBytes: BATCH_BYTES });
      if (!batch.lines.length) return { numSent, waitingBytes: 0, problem: "" };
      const { sent, problem, waitS } = await this.#send(batch);
      numSent += sent;
      if (!problem) {
        numFailures = 0;
        continue;
      }
      const backoffS = Math.min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** numFailures);
      // Jitter: clients that failed together do not come again together.
      const wait = Math.max(waitS, backoffS * (0.5 + Math.random() / 2));
      numFailures += 1;
      if (this.monotonic() + wait > deadlineS) {
        return { numSent, waitingBytes: this.spool.readCounts().waitingBytes, problem };
      }
      await this.sleep(wait);
    }
  }

  async revoke() {
    const number = this.spool.clear();
    this.consent = null;
    const body = JSON.stringify({ user: this.author.user, at: this.now().toISOString() });
    const answer = await this.post("/v1/revocations", "application/json", body);
    if (answer.status !== 202) throw new Error(`the service answered ${answer.status}`);
    return number;
  }

  readCounts() {
    return this.spool.readCounts();
  }

  async #send(batch) {
    const ids = batch.lines.map(readId);
    const readable = batch.lines.filter((_, place) => ids[place]);
    let answer;
    try {
      const type = "application/cloudevents-batch+json";
      answer = await this.post("/v1/events", type, `[${readable.join(",")}]`);
    } catch (error) {
      return { sent: 0, problem: `no answer (${error.name})`, waitS: 0 };
    }
    if (answer.status !== 200) return this.#takeRefusal(batch, answer);
    const results = readResults(answer.body, ids.filter(Boolean));
    if (results === null) {
      return { sent: 0, problem: "the answer is no list of results", waitS: 0 };
    }
    const givenUp = {};
    const count = (reason, number) => {
      if (number) givenUp[reason] = (givenUp[reason] ?? 0) + number;
    };
    count("Unreadable", batch.lines.length - readable.length);
    const again = [];
    let sent = 0;
    results.forEach(({ status, reason }, place) => {
      if (status >= 500 || LATER.has(status)) again.push(readable[place]);
      else if (status === 200 || status === 202) sent += 1;
      else count(`${status} ${reason}`, 1);
    });
    this.spool.commit(batch, { numSent: sent, givenUp, again });
    this.#batchEvents = BATCH_EVENTS;
    const problem = again.length ? `${again.length} events are to be sent again` : "";
    return { sent, problem, waitS: 0 };
  }

  #takeRefusal(batch, { status, retryAfterS = 0 }) {
    if (TOO_MUCH.has(status) && batch.lines.length > 1) {
      this.#batchEvents = Math.floor(batch.lines.length / 2);
      return { sent: 0, problem: "", waitS: 0 };
    }
    if (TOO_MUCH.has(status)) {
      this.spool.commit(batch, { numSent: 0, givenUp: { [`${status} Refused`]: 1 } });
      this.#batchEvents = BATCH_EVENTS;
      return { sent: 0, problem: "", waitS: 0 };
    }
    // Where key or address are wrong, sending again would be answered in the same way.
    const isLater = status >= 500 || LATER.has(status);
    const problem = `the service answered ${status}`;
    return { sent: 0, problem, waitS: isLater ? retryAfterS : Infinity };
  }
}

export function makeEvent(kind, payload, about, author, consent, { id, time }) {
  const optional = ["policyVersion", "experiment", "arm"].filter((name) => about[name]);
  return {
    specversion: "1.0",
    id,
    source: author.source,
    type: `dev.etude.feedback.${kind}.v1`,
    subject: about.subject,
    time: time.toISOString(),
    data: {
      tenant: author.tenant,
      user: author.user,
      rollout: about.rollout,
      ...Object.fromEntries(optional.map((name) => [name, about[name]])),
      consent: { granted: consent.granted, policyVersion: consent.terms, at: consent.decided },
      payload,
    },
  };
}

export function hashLines(secret, lines) {
  const hashed = [...lines].map(stripBlanks).filter(Boolean).slice(0, MAX_EDIT_LINES);
  return hashed.map((line) => hashLine(secret, line)).sort();
}

export function countAliveLines(secret, lineHashes, text) {
  const left = new Map();
  for (const hash of lineHashes) left.set(hash, (left.get(hash) ?? 0) + 1);
  let alive = 0;
  for (const line of text.split("\n")) {
    const hash = hashLine(secret, stripBlanks(line));
    const number = left.get(hash) ?? 0;
    if (number) {
      left.set(hash, number - 1);
      alive += 1;
    }
  }
  return alive;
}

export function checkAddress(url) {
  let parts;
  try {
    parts = new URL(url);
  } catch {
    parts = null;
  }
  if (!parts || !["https:", "http:"].includes(parts.protocol) || !parts.hostname) {
    throw new TypeError("is no address that begins with https:// or http://");
  }
  if (parts.protocol === "http:" && !LOCAL.has(parts.hostname)) {
    throw new TypeError(
      "is not on this machine, and http:// would show the API key: use https://",
    );
  }
}

export function HttpPost(url, key) {
  checkAddress(url);
  const base = url.replace(/\/+$/, "");
  return async (path, mediaType, body) => {
    const answer = await fetch(base + path, {
      method: "POST",
      headers: { "content-type": mediaType, authorization: `Bearer ${key}` },
      body,
      redirect: "manual",
      signal: AbortSignal.timeout(REQUEST_MS),
    });
    const wait = answer.headers.get("retry-after") ?? "";
    const retryAfterS = /^[0-9]{1,7}$/.test(wait) ? Number(wait) : 0;
    return { status: answer.status, body: await readBounded(answer), retryAfterS };
  };
}

async function readBounded(answer) {
  const parts = [];
  let size = 0;
  for await (const part of answer.body ?? []) {
    size += part.length;
    if (size > MAX_ANSWER_BYTES) throw new RangeError("the answer is too long");
    parts.push(part);
  }
  return Buffer.concat(parts).toString("utf8");
}

function readId(line) {
  try {
    const { id } = JSON.parse(line);
    return typeof id === "string" ? id : "";
  } catch {
    return "";
  }
}

// Status and reason of each event; null if the answer is not to these events.
function readResults(body, ids) {
  try {
    const { results } = JSON.parse(body);
    const isSound =
      results.length === ids.length &&
      results.every(
        ({ id, status, reason }, place) =>
          Number.isInteger(status) && reason !== undefined && (id === "" || id === ids[place]),
      );
    return isSound ? results : null;
  } catch {
    return null;
  }
}

function stripBlanks(line) {
  return line.replace(/^[ \t\r\n]+|[ \t\r\n]+$/g, "");
}

function hashLine(secret, line) {
  return createHmac("sha256", secret).update(line, "utf8").digest("hex").slice(0, 16);
}
