// SPDX-License-Identifier: Apache-2.0
// Perfetto's trace processor in a process of its own: bytes of its RPC stream on stdin, its answers
// on stdout. The argument is the folder of a Perfetto UI, whose engine_bundle.js is a web worker
// around the trace processor's WebAssembly.
//
// The bundle refuses to run where it sees Node's globals, and wants to be told of a message port; so
// it gets a context that holds what it asks of a browser's worker and nothing else. Must not depend on:
// what is asked.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];

/** What emscripten uses, synchronously, to load the WebAssembly beside the bundle. */
class FileRequest {
  open(_method, url) {
    this.file = path.join(folder, path.basename(url));
  }
  send() {
    const bytes = fs.readFileSync(this.file);
    this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
    this.status = 200;
  }
}

const worker = {
  WorkerGlobalScope: class {},
  XMLHttpRequest: FileRequest,
  importScripts: () => {},
  location: { href: `file://${folder}/engine_bundle.js` },
  console: { log: console.error, warn: console.error, error: console.error },
  performance,
  setTimeout,
  TextDecoder,
};
worker.self = worker;
vm.createContext(worker);
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), worker);
// The bundle takes byte arrays of its own context alone.
const bytesOf = vm.runInContext("(chunk) => Uint8Array.from(chunk)", worker);

const port = {
  postMessage(answer) {
    for (let written = 0; written < answer.length; ) {
      written += fs.writeSync(process.stdout.fd, answer, written);
    }
  },
};
worker.onmessage({ data: port });
// The bundle finishes its start in promises, which are settled before this is called.
setImmediate(() => process.stdin.on("data", (chunk) => port.onmessage({ data: bytesOf(chunk) })));
