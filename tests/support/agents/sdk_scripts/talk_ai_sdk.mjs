// A conversation through Vercel's AI SDK: `node talk_ai_sdk.mjs BASE`, a message a line in, its answer as JSON a line out.
// Answers are whole and streamed in turn.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const { resolve } = createRequire(`${process.env.AI_SDK}/`);
const load = (name) => import(pathToFileURL(resolve(name)).href);
const { generateText, streamText } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");

const provider = createOpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "user" });
const messages = [];
let streamed = false;
for await (const content of createInterface({ input: process.stdin })) {
  messages.push({ role: "user", content });
  const asked = { model: provider("live"), system: "Be brief.", messages, maxRetries: 0 };
  const answer = streamed ? streamText({ ...asked, onError: ({ error }) => { throw error; } }) : await generateText(asked);
  const text = await answer.text;
  messages.push(...(await answer.response).messages);
  streamed = !streamed;
  console.log(JSON.stringify({ text }));
}
