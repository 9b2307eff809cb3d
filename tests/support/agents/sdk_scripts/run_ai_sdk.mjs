// The task through Vercel's AI SDK with its default provider (OpenAI's Responses API; items go back by reference):
// `node run_ai_sdk.mjs BASE BASE responses|chat`, whole and then streamed.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The packages stand in a folder of their own, not above this file.
const { resolve } = createRequire(`${process.env.AI_SDK}/`);
const load = (name) => import(pathToFileURL(resolve(name)).href);
const { generateText, streamText, stepCountIs, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { z } = await load("zod");

const [first, second, route] = process.argv.slice(2);
for (const [base, streamed] of [[first, false], [second, true]]) {
  const provider = createOpenAI({ baseURL: `${base}/v1`, apiKey: "any" });
  const asked = {
    model: route === "chat" ? provider.chat("turnwise-tiny") : provider("turnwise-tiny"),
    system: "Be brief.",
    prompt: "What are 1+2 and 3+4, and what is the sum of the two?",
    stopWhen: stepCountIs(5),
    maxRetries: 0,
    tools: {
      add: tool({
        description: "Add two integers.",
        inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
        execute: ({ a, b }) => a + b,
      }),
    },
  };
  console.log(await (streamed ? streamText(asked).text : (await generateText(asked)).text));
}
