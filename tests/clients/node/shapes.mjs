// Asks a server for answers with a shape and calls of tools, through the AI SDK: `node shapes.mjs JSON`. Prints JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, tool } from "ai";
import { z } from "zod";

const { url, model, prompt } = JSON.parse(process.argv[2]);
const [apiKey, baseURL] = ["none", `${url}/v1`];
const schema = z.object({ city: z.enum(["Oslo", "Rome"]) }).strict();

async function ask(languageModel) {
  const asked = { model: languageModel, prompt, temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
  const { object } = await generateObject({ ...asked, schema });
  const stream = streamObject({ ...asked, schema });
  for await (const part of stream.partialObjectStream) void part;
  const look = tool({ description: "Look a city up.", inputSchema: schema, execute: async ({ city }) => `${city}.` });
  const toolChoice = { type: "tool", toolName: "look" };
  const first = await generateText({ ...asked, tools: { look }, toolChoice, stopWhen: stepCountIs(1) });
  return {
    object,
    streamed: await stream.object,
    calls: first.toolCalls.map((call) => [call.toolName, call.input]),
    results: first.toolResults.map((result) => result.output),
  };
}

console.log(
  JSON.stringify({
    chats: await ask(createOpenAICompatible({ name: "chunkattn", apiKey, baseURL, supportsStructuredOutputs: true })(model)),
    responses: await ask(createOpenAI({ apiKey, baseURL })(model)),
  }),
);
