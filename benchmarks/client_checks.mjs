// The checks of `clients.py` for clients of Node.js: `node client_checks.mjs CLIENT URL`, in a directory that has node_modules.
// A check throws where the answer is not what the client's user expects.

import assert from "node:assert/strict";
import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.join(process.cwd(), "client"));
const [PROMPT, MODEL, KEY] = ["def add(a, b):\n    return", "bundled", "none"];
const CHAT = [{ role: "user", content: "Write a function that adds." }];
const FEATURES = [
  "completion", "chat", "responses", "stream", "n", "logprobs", "stop", "tools", "JSON schema", "seed", "refusal of embeddings",
];

function isPerson(value) {
  assert.deepEqual(Object.keys(value).sort(), ["age", "name"]);
  assert.equal(typeof value.name, "string");
  assert.ok([...value.name].length <= 8, value.name);
  assert.ok(value.age >= 0 && value.age <= 99, JSON.stringify(value));
}

function same([first, second]) {
  assert.ok(first);
  assert.equal(first, second);
}

async function refused(call) {
  const said = await call().then(() => assert.fail("they were answered"), (error) => `${error.statusCode} ${error.message}`);
  assert.match(said, /404|embeddings/i);
}

function person() {
  const { z } = require("zod");
  return z.strictObject({ name: z.string().max(8), age: z.number().int().min(0).max(99) });
}

function ofOpenai(url) {
  const { OpenAI } = require("openai");
  const { zodResponseFormat } = require("openai/helpers/zod");
  const schema = require("zod").toJSONSchema(person());
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: KEY, maxRetries: 0 });
  const complete = (options) => client.completions.create({ model: MODEL, prompt: PROMPT, max_tokens: 12, seed: 1, ...options });
  const asked = (options) => ({ model: MODEL, messages: CHAT, max_tokens: 12, seed: 1, ...options });
  const chat = (options) => client.chat.completions.create(asked(options));
  const text = async (options) => (await chat(options)).choices[0].message.content;
  return {
    completion: async () => assert.ok((await complete({})).choices[0].text),
    chat: async () => assert.ok(await text({})),
    responses: async () => {
      const input = { model: MODEL, input: CHAT, max_output_tokens: 12, seed: 1 };
      const answer = await client.responses.create(input);
      assert.equal(answer.output_text, await text({}));
      let whole = "";
      for await (const event of await client.responses.create({ ...input, stream: true })) {
        if (event.type === "response.output_text.delta") whole += event.delta;
      }
      assert.equal(whole, answer.output_text);
    },
    stream: async () => {
      const pieces = [];
      for await (const chunk of await chat({ stream: true })) pieces.push(chunk.choices[0]?.delta.content ?? "");
      assert.ok(pieces.length > 1);
      assert.equal(pieces.join(""), await text({}));
    },
    n: async () => {
      const { choices } = await chat({ n: 4, temperature: 1.2 });
      assert.ok(new Set(choices.map((choice) => choice.message.content)).size > 1);
    },
    logprobs: async () => {
      const { content } = (await chat({ logprobs: true, top_logprobs: 2 })).choices[0].logprobs;
      assert.ok(content.length && content.every((item) => item.logprob <= 0 && item.top_logprobs.length === 2));
    },
    stop: async () => assert.ok(!(await text({ stop: ["\n"], max_tokens: 40 })).includes("\n")),
    tools: async () => {
      const tool = { type: "function", function: { name: "person", parameters: schema } };
      const forced = { type: "function", function: { name: "person" } };
      const { message } = (await chat({ tools: [tool], tool_choice: forced, max_tokens: 80 })).choices[0];
      isPerson(JSON.parse(message.tool_calls[0].function.arguments));
    },
    "JSON schema": async () => {
      const format = zodResponseFormat(person(), "person");
      isPerson((await client.chat.completions.parse(asked({ response_format: format, max_tokens: 80 }))).choices[0].message.parsed);
    },
    seed: async () => same([await text({ seed: 5, temperature: 1 }), await text({ seed: 5, temperature: 1 })]),
    "refusal of embeddings": () => refused(() => client.embeddings.create({ model: MODEL, input: "x" })),
  };
}

function ofAiSdk(url) {
  const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
  const { Output, embed, generateText, streamText, tool } = require("ai");
  const shoal = createOpenAICompatible({ name: "shoal", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
  const asked = (options) => ({
    model: shoal(MODEL), prompt: "Hi", maxOutputTokens: 12, seed: 1, maxRetries: 0, ...options,
  });
  const text = async (options) => (await generateText(asked(options))).text;
  return {
    completion: async () => assert.ok(await text({ model: shoal.completionModel(MODEL), prompt: PROMPT })),
    chat: async () => assert.ok(await text({})),
    stream: async () => {
      const pieces = [];
      for await (const piece of streamText(asked({})).textStream) pieces.push(piece);
      assert.ok(pieces.length > 1);
      assert.equal(pieces.join(""), await text({}));
    },
    stop: async () => assert.ok(!(await text({ stopSequences: ["\n"], maxOutputTokens: 40 })).includes("\n")),
    tools: async () => {
      const tools = { person: tool({ description: "Notes a person.", inputSchema: person() }) };
      const toolChoice = { type: "tool", toolName: "person" };
      const { toolCalls } = await generateText(asked({ tools, toolChoice, maxOutputTokens: 80 }));
      isPerson(toolCalls[0].input);
    },
    "JSON schema": async () => {
      const { output } = await generateText(asked({ maxOutputTokens: 80, output: Output.object({ schema: person() }) }));
      isPerson(output);
    },
    seed: async () => same([await text({ seed: 5, temperature: 1 }), await text({ seed: 5, temperature: 1 })]),
    "refusal of embeddings": () =>
      refused(() => embed({ model: shoal.embeddingModel(MODEL), value: "x", maxRetries: 0 })),
  };
}

const CLIENTS = { "openai (Node.js)": ["openai", ofOpenai], "Vercel AI SDK": ["ai", ofAiSdk] };

const [client, url] = process.argv.slice(2);
const [name, checksOf] = CLIENTS[client];
const manifest = path.join("node_modules", name, "package.json");
const report = { client, version: null, found: {} };
if (fs.existsSync(manifest)) {
  report.version = JSON.parse(fs.readFileSync(manifest, "utf8")).version;
  const checks = checksOf(url);
  for (const feature of FEATURES) {
    const done = checks[feature]?.().then(() => "yes", (error) => `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, 300));
    report.found[feature] = (await done) ?? "-";
  }
}
console.log(JSON.stringify(report));
