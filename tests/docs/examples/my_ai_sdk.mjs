// An agent of Vercel's AI SDK, as it comes: npm install ai @ai-sdk/openai @ai-sdk/anthropic zod
import { generateText, stepCountIs, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // or they are printed beside the answer
const [api, prompt] = process.argv.slice(2);
const address = { baseURL: process.env.RFT_BASE_URL, apiKey: process.env.RFT_KEY };
const models = {
  responses: () => createOpenAI(address)("policy"),
  chat: () => createOpenAI(address).chat("policy"),
  messages: () => createAnthropic(address)("policy"),
};
const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const { text } = await generateText({ model: models[api](), tools: { add }, stopWhen: stepCountIs(4), prompt });
console.log(text);
