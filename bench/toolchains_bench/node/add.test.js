const assert = require("node:assert");
const test = require("node:test");
const semver = require("semver");
const { add } = require("./add.js");

test("sums", () => assert.strictEqual(add(2, 3), 5));
test("dependencies are there", () => assert.ok(semver.gt("2.0.0", "1.0.0")));
