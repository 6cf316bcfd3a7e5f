/** Decision of the user about feedback. */
export interface UserConsent {
  granted: boolean;
  /** Version of the text that the user agreed to. */
  terms: string;
  /** Time of the decision, in RFC 3339 with a zone. */
  decided: string;
}

/** Sender of events. */
export interface EventAuthor {
  /** Client and version, such as "my-editor/1.2"; without blanks. */
  source: string;
  tenant: string;
  /** Pseudonym of the user within the tenant. */
  user: string;
}

/** Conversation that an event is about. */
export interface EventContext {
  /** Conversation, by a name of the client's. */
  subject: string;
  /** As the gateway's header x-etude-rollout says. */
  rollout: string;
  /** As the gateway's header x-policy-version says. */
  policyVersion?: string;
  experiment?: string;
  arm?: string;
}

export interface SpoolCounts {
  waitingBytes: number;
  numSent: number;
  /** Events that were given up, by reason. */
  givenUp: Record<string, number>;
}

export interface FlushReport {
  numSent: number;
  /** Of events that are kept for a later flush. */
  waitingBytes: number;
  /** Reason why events wait; empty if none does. */
  problem: string;
}

export interface HttpAnswer {
  status: number;
  body: string;
  retryAfterS?: number;
}

/** Posts path, media type and body; throws where no answer comes. */
export type Post = (path: string, mediaType: string, body: string) => Promise<HttpAnswer>;

export interface SpoolBatch {
  lines: string[];
  generation: number;
  start: number;
  end: number;
}

/** Events of one folder that wait to be sent. One process may use a folder at a time. */
export class EventSpool {
  constructor(folder: string, options?: { maxBytes?: number });
  append(line: string): boolean;
  refuse(reason: string): void;
  readBatch(limits: { maxEvents: number; maxBytes: number }): SpoolBatch;
  commit(
    batch: SpoolBatch,
    outcome: { numSent: number; givenUp: Record<string, number>; again?: string[] },
  ): void;
  clear(): number;
  readCounts(): SpoolCounts;
}

/** Sends the events of one user; without consent it keeps and sends nothing. */
export class EventClient {
  constructor(parts: {
    spool: EventSpool;
    post: Post;
    author: EventAuthor;
    consent: UserConsent | null;
    now?: () => Date;
    makeId?: () => string;
    sleep?: (seconds: number) => Promise<unknown>;
    monotonic?: () => number;
  });
  consent: UserConsent | null;
  /** Adds an event, which is on the disk then; returns its id, or "" if it is not kept. */
  add(
    kind: string,
    payload: Record<string, unknown>,
    about: EventContext,
    options?: { eventId?: string },
  ): string;
  /** Sends what waits, again and again until all is sent or time is over. */
  flush(options?: { timeoutS?: number }): Promise<FlushReport>;
  /** Takes the consent back: forgets what waits, and tells the service. */
  revoke(): Promise<number>;
  readCounts(): SpoolCounts;
}

/** Makes one CloudEvent. */
export function makeEvent(
  kind: string,
  payload: Record<string, unknown>,
  about: EventContext,
  author: EventAuthor,
  consent: UserConsent,
  made: { id: string; time: Date },
): Record<string, unknown>;

/** Hashes lines of an edit, sorted: 16 hexadecimal digits each, of HMAC-SHA-256. */
export function hashLines(secret: Uint8Array, lines: Iterable<string>): string[];

/** Counts the lines of an edit that a file still has. */
export function countAliveLines(secret: Uint8Array, lineHashes: string[], text: string): number;

/** Throws TypeError for an address to which no API key may be sent. */
export function checkAddress(url: string): void;

/** Posts to the feedback service over HTTPS, or HTTP on this machine; follows no redirect. */
export function HttpPost(url: string, key: string): Post;
