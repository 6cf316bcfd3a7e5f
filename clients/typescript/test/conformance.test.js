// The cases that the Python client passes too, and kill -9.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import fs from "node:fs";
import http from "node:http";
import os from "node:os";
import path from "node:path";
import test from "node:test";

import * as feedback from "../index.js";

const { EventClient, EventSpool } = feedback;
const CASES = JSON.parse(
  fs.readFileSync(new URL("../../conformance/events.json", import.meta.url), "utf8"),
);
const AUTHOR = { source: "my-editor/1.2", tenant: "acme", user: "u-1" };
const CONSENT = { granted: true, terms: "2026-11", decided: "2026-11-01T08:00:00Z" };
const ABOUT = { subject: "c-1", rollout: "r-1" };

const makeFolder = () => fs.mkdtempSync(path.join(os.tmpdir(), "etude-"));

function makeClient(folder, post, options = {}) {
  let number = 0;
  return new EventClient({
    spool: new EventSpool(folder, options),
    post,
    author: AUTHOR,
    consent: CONSENT,
    makeId: () => `e-${++number}`,
    monotonic: () => 0,
    ...options,
  });
}

function waiting(client) {
  const { lines } = client.spool.readBatch({ maxEvents: Infinity, maxBytes: Infinity });
  return lines.map((line) => JSON.parse(line).id);
}

function play(answers, requests) {
  const left = [...answers];
  return async (path_, mediaType, body) => {
    assert.deepEqual(
      [path_, mediaType],
      ["/v1/events", "application/cloudevents-batch+json"],
    );
    const ids = JSON.parse(body).map((event) => event.id);
    requests.push(ids);
    const answer = left.shift();
    if (answer.isLost) throw new TypeError("fetch failed");
    const results = (answer.results ?? []).map(([status, reason], place) => {
      return { id: ids[place], status, reason, message: "" };
    });
    const text = answer.body ?? JSON.stringify({ results });
    return { status: answer.status, body: text, retryAfterS: Number(answer.retryAfter ?? 0) };
  };
}

for (const each of CASES.exchanges) {
  test(`exchange: ${each.name}`, async () => {
    const requests = [];
    const client = makeClient(makeFolder(), play(each.answers, requests));
    for (let turn = 0; turn < each.events; turn++) client.add("accepted", { turn }, ABOUT);
    const reports = [];
    for (let n = 0; n < each.flushes; n++) reports.push(await client.flush({ timeoutS: 0 }));
    const names = (numbers) => numbers.map((number) => `e-${number}`);
    assert.deepEqual(requests, each.requests.map(names));
    const { numSent, givenUp } = client.readCounts();
    assert.deepEqual({ numSent, givenUp }, { numSent: each.sent, givenUp: each.givenUp });
    assert.deepEqual(waiting(client), names(each.waiting));
    assert.equal(Boolean(reports.at(-1).problem), each.waiting.length > 0);
  });
}

test("an event has the form that the service reads", () => {
  for (const { kind, payload, about, author, consent, id, time, event } of CASES.events) {
    const { granted, policyVersion: terms, at: decided } = consent;
    const made = { id, time: new Date(time) };
    const agreed = { granted, terms, decided };
    assert.deepEqual(feedback.makeEvent(kind, payload, about, author, agreed, made), event);
  }
});

test("lines are hashed, and counted again, as the Python client does", () => {
  for (const { secret, lines, hashes } of CASES.lineHashes) {
    assert.deepEqual(feedback.hashLines(Buffer.from(secret, "hex"), lines), hashes);
  }
  for (const { secret, hashes, text, alive } of CASES.aliveLines) {
    assert.equal(feedback.countAliveLines(Buffer.from(secret, "hex"), hashes, text), alive);
  }
});

test("a key is sent only where nobody can read it", () => {
  for (const { url, isAllowed } of CASES.addresses) {
    if (isAllowed) feedback.checkAddress(url);
    else assert.throws(() => feedback.checkAddress(url), /https:/);
  }
});

test("without consent nothing is written", () => {
  const folder = path.join(makeFolder(), "spool");
  for (const consent of [null, { ...CONSENT, granted: false }]) {
    assert.equal(makeClient(folder, null, { consent }).add("accepted", { turn: 0 }, ABOUT), "");
  }
  assert.equal(fs.existsSync(folder), false);
});

test("a full spool and a large event are refused and counted", () => {
  const client = makeClient(makeFolder(), null, { maxBytes: 700 });
  const added = [0, 1, 2].map((turn) => client.add("accepted", { turn }, ABOUT));
  assert.deepEqual(added, ["e-1", "e-2", ""]);
  client.add("followup", { text: "x".repeat(256 << 10) }, ABOUT);
  assert.deepEqual(client.readCounts().givenUp, { SpoolFull: 1, TooLarge: 1 });
});

test("a spool that is never empty does not grow", () => {
  const folder = makeFolder();
  const spool = new EventSpool(folder, { maxBytes: 1 << 19 });
  const sent = [];
  for (let number = 0; number < 40; number++) {
    assert.ok(spool.append(`${number}`.padStart(1 << 16, " ")));
    if (number < 3) continue;
    const batch = spool.readBatch({ maxEvents: 1, maxBytes: 1 << 20 });
    sent.push(...batch.lines.map(Number));
    spool.commit(batch, { numSent: 1, givenUp: {} });
    assert.ok(fs.statSync(path.join(folder, "events.jsonl")).size <= 3 << 19);
  }
  assert.deepEqual(sent, [...Array(37).keys()]);
  assert.deepEqual(spool.readCounts(), {
    waitingBytes: 3 * ((1 << 16) + 1),
    numSent: 37,
    givenUp: {},
  });
});

test("a killed process leaves every event that was added", async () => {
  const folder = makeFolder();
  const code = `
    import { EventSpool } from ${JSON.stringify(new URL("../spool.js", import.meta.url).href)};
    import fs from "node:fs";
    const spool = new EventSpool(${JSON.stringify(folder)});
    for (let n = 1; ; n++) { spool.append(JSON.stringify({ id: String(n) })); fs.writeSync(1, n + "\\n"); }`;
  const child = spawn(process.execPath, ["--input-type=module", "-e", code]);
  let told = "";
  child.stdout.on("data", (data) => {
    told += data;
    if (told.split("\n").length > 30) child.kill("SIGKILL");
  });
  await new Promise((resolve) => child.on("close", resolve));
  fs.appendFileSync(path.join(folder, "events.jsonl"), '{"id":"torn');
  const added = told.split("\n").slice(0, -1);
  const kept = waiting(makeClient(folder, null));
  assert.deepEqual(kept.slice(0, added.length), added);
  assert.ok(kept.length <= added.length + 1);
});

test("events go over HTTP with the key, and a redirect is not followed", async () => {
  const seen = [];
  const server = http.createServer((request, response) => {
    let body = "";
    request.on("data", (data) => (body += data));
    request.on("end", () => {
      seen.push([request.url, request.headers.authorization, JSON.parse(body).length]);
      if (seen.length === 1) return response.writeHead(307, { location: "/elsewhere" }).end();
      const results = JSON.parse(body).map(({ id }) => ({ id, status: 202, reason: "Stored" }));
      response.end(JSON.stringify({ results }));
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const post = feedback.HttpPost(`http://127.0.0.1:${server.address().port}/`, "etude_k");
  const client = makeClient(makeFolder(), post);
  client.add("accepted", { turn: 0 }, ABOUT);
  assert.match((await client.flush({ timeoutS: 0 })).problem, /307/);
  assert.deepEqual(await client.flush({ timeoutS: 0 }), {
    numSent: 1,
    waitingBytes: 0,
    problem: "",
  });
  assert.deepEqual(seen, [
    ["/v1/events", "Bearer etude_k", 1],
    ["/v1/events", "Bearer etude_k", 1],
  ]);
  server.closeAllConnections();
  server.close();
});
