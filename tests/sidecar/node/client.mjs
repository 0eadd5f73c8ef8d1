// What OpenAI's client for Node makes of a server: node client.mjs BASE_URL KEY, a JSON object on standard output.

import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const picture = { type: "image_url", image_url: { url: "data:image/png;base64,iVBORw0KGgo=" } };
const parameters = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", parameters } }];

async function failure(model, stream) {
  try {
    const reply = await client.chat.completions.create({ model, messages, stream });
    for await (const chunk of stream ? reply : []) void chunk;
  } catch (error) {
    return [error.constructor.name, error.status ?? null, error.code ?? null, error.message];
  }
  throw new Error(`${model} did not fail`);
}

async function all(stream) {
  const chunks = [];
  for await (const chunk of await stream) chunks.push(chunk);
  return chunks;
}

const { chat, embeddings, responses, models } = client;
const got = {
  chat: await chat.completions.create({ model: "gpt-4o", messages }),
  stream: await all(
    chat.completions.create({ model: "gpt-4o", messages, stream: true, stream_options: { include_usage: true } }),
  ),
  tools: await chat.completions.create({ model: "gpt-4o", messages, tools }),
  tools_streamed: await chat.completions.stream({ model: "gpt-4o", messages, tools }).finalMessage(),
  picture: await chat.completions.create({ model: "gpt-4o", messages: [{ role: "user", content: [picture] }] }),
  embeddings: await embeddings.create({ model: "e", input: ["one", "two"] }),
  response: await responses.create({ model: "gpt-4o", input: "hi" }),
  response_streamed: await all(responses.create({ model: "gpt-4o", input: "hi", stream: true })),
  models: (await models.list()).data,
  failures: {},
};
for (const model of ["bad", "limited", "down", "breaks"]) {
  got.failures[model] = await failure(model, model === "breaks");
}
console.log(JSON.stringify(got));
