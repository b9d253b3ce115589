# Sidekiq's side of `messages` and `fan_out`: a job that does nothing, and jobs put in by the thousand.
#
#   sidekiq -r benchmarks/sidekiq_jobs.rb …          works them off
#   ruby benchmarks/sidekiq_jobs.rb QUEUE COUNT      puts COUNT of them in, and prints how many seconds that took
#
# Both read REDIS_URL.

require "sidekiq"

class Nothing
  include Sidekiq::Worker
  sidekiq_options retry: 25, backtrace: false

  def perform(_project)
  end
end

def push(queue, count)
  (1..count).each_slice(1000) do |projects|
    Sidekiq::Client.push_bulk("class" => Nothing, "queue" => queue, "args" => projects.map { |project| [project] })
  end
end

if $PROGRAM_NAME == __FILE__
  queue, count = ARGV
  Sidekiq.logger.level = Logger::ERROR
  # What a first call costs, the connection among it, is not asked.
  push("warm", 1000)
  began = Process.clock_gettime(Process::CLOCK_MONOTONIC)
  push(queue, Integer(count))
  puts Process.clock_gettime(Process::CLOCK_MONOTONIC) - began
end
